"""Verifies a layout from the parent, which has no torch: on the mock world, or on real ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import cast

from axonlaunch import config as configuration
from axonlaunch.config import RunConfig
from axonlaunch.config.layout import num_ranks
from axonlaunch.config.model import HuggingFaceConfig
from axonlaunch.planning import auto_strategy
from axonlaunch.system import forked_call
from axonlaunch.system.temporary_folders import temporary_folder
from axonlaunch.verification.result import ParityResult, failed

_log = logging.getLogger(__name__)


def verify(
    context: ForkServerContext,
    overrides: Sequence[str],
    *,
    config_name: str,
    config_dirs: Sequence[Path],
    steps: int,
) -> ParityResult:
    """Check a configuration, run its layout and one process, compare.

    ``launch.backend=auto`` means the mock world here, which needs neither ports nor devices; what
    is compiled needs processes.

    Raises:
        ConfigError: The configuration can't be run.
    """
    compose = partial(configuration.compose, config_name=config_name, config_dirs=config_dirs)
    config = auto_strategy.load_auto_strategy(
        overrides, compose=compose, server=lambda: context, config_dirs=config_dirs
    )
    if isinstance(config.model, HuggingFaceConfig):
        # Any weights do, and those of the seed need no files.
        config = configuration.with_values(config, {"model.init": "random"})
    if config.launch.backend == "auto":
        backend = "gloo" if config.train.compile else "mock"
        config = configuration.with_values(config, {"launch.backend": backend})
    config = forked_call.call(context, "axonlaunch.preflight.checks:resolve", config)
    if config.launch.backend == "mock":
        verdict: ParityResult = forked_call.call(
            context, "axonlaunch.verification.compare:on_mock", config, steps
        )
        return verdict
    return _on_processes(context, config, steps)


def _on_processes(context: ForkServerContext, config: RunConfig, steps: int) -> ParityResult:
    with temporary_folder() as folder:
        run = "axonlaunch.verification.compare:"
        arguments = (config, steps, str(folder))
        reference = forked_call.call(context, f"{run}save_reference", *arguments)
        if reference is not None:  # there is none: it says why
            return cast("ParityResult", reference)
        ranks = [(*arguments, rank) for rank in range(num_ranks(config))]
        try:
            verdict, *_ = forked_call.call_together(context, f"{run}verify_on_rank", ranks)
        except forked_call.CallsFailedError as error:
            for rank, failure in error.errors.items():
                _log.debug("rank %d failed", rank, exc_info=failure)
            return failed(config, steps, _who(error.errors))
        return cast("ParityResult", verdict)


def _who(errors: Mapping[int, Exception]) -> str:
    """Say which rank failed, of several the one that did not just lose its connection."""
    rank = min(errors, key=lambda number: ("onnection" in str(errors[number]), number))
    return f"rank {rank} failed: {type(errors[rank]).__name__}: {errors[rank]}"
