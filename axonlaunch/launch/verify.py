"""Verifies a layout from the parent, which has no torch: on the mock world, or on real ranks."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from axonlaunch import config as configuration
from axonlaunch.config import RunConfig
from axonlaunch.config.layout import layout
from axonlaunch.launch import forkserver
from axonlaunch.verdict import Verdict, tolerance_of


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
        wait(calls, return_when=FIRST_EXCEPTION)
        if any(call.done() and call.exception() for call in calls):
            time.sleep(0.3)  # a peer's lost connection may be told before its cause
            errors = {rank: call.exception() for rank, call in enumerate(calls) if call.done()}
            return _failed(config, steps, errors)
        verdict: Verdict = calls[0].result()
        return verdict


def _failed(config: RunConfig, steps: int, errors: Mapping[int, BaseException | None]) -> Verdict:
    """Say which rank failed, of several the one that did not just lose its connection."""
    assert config.launch.nproc != "auto"
    failed = {rank: error for rank, error in errors.items() if error is not None}
    rank = min(failed, key=lambda one: ("onnection" in str(failed[one]), one))
    return Verdict(
        passed=False,
        layout=str(layout(config, world_size=config.launch.nproc)),
        steps=steps,
        tolerance=tolerance_of(config),
        failure=f"rank {rank} failed: {type(failed[rank]).__name__}: {failed[rank]}",
    )
