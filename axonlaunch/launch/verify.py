"""Verifies a layout from the parent, which has no torch: on the mock world, or on real ranks."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonlaunch import config as configuration
from axonlaunch.config import RunConfig
from axonlaunch.launch import forkserver

if TYPE_CHECKING:
    from axonlaunch.verification import Verdict


def verify(
    context: ForkServerContext,
    overrides: Sequence[str],
    *,
    config_name: str,
    config_dirs: Sequence[Path],
    steps: int,
) -> Verdict:
    """Check a configuration, run its layout and one process, compare.

    ``launch.backend=auto`` means the mock world here, which needs neither ports nor devices; what
    is compiled needs processes.

    Raises:
        ConfigError: The configuration can't be run.
    """
    config = configuration.load(overrides, config_name=config_name, config_dirs=config_dirs)
    if config.launch.backend == "auto":
        launch = dataclasses.replace(
            config.launch, backend="gloo" if config.train.compile else "mock"
        )
        config = dataclasses.replace(config, launch=launch)
    config = forkserver.call(context, "axonlaunch.preflight:resolve", config)
    if config.launch.backend == "mock":
        verdict: Verdict = forkserver.call(
            context, "axonlaunch.verification:on_mock", config, steps
        )
        return verdict
    return _on_processes(context, config, steps)


def _on_processes(context: ForkServerContext, config: RunConfig, steps: int) -> Verdict:
    assert config.launch.nproc != "auto"
    nproc = config.launch.nproc
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(nproc) as pool:
        target = "axonlaunch.verification:on_rank"
        calls: list[Future[Any]] = [
            pool.submit(forkserver.call, context, target, config, steps, rank, folder)
            for rank in range(nproc)
        ]
        done, _ = wait(calls, return_when=FIRST_EXCEPTION)
        failed = [call for call in calls if call in done and call.exception() is not None]
        if failed:
            rank, error = calls.index(failed[0]), failed[0].exception()
            raise RuntimeError(f"rank {rank} failed: {type(error).__name__}: {error}") from error
        verdict: Verdict = calls[0].result()
        return verdict
