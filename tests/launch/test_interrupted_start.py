"""A run that is interrupted before its ranks are ready records how it ended."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from axonlaunch.config import load
from axonlaunch.diagnostics.report.record.run_record import read_run
from axonlaunch.launch.launcher import LaunchOptions
from axonlaunch.launch.local import launcher


def test_interrupt_before_ranks_are_ready_is_not_a_killed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "run_ranks", interrupted)
    overrides = ["launch.nproc=1", "launch.backend=mock", "launch.threads=1"]
    config = load([*overrides, f"run_dir={tmp_path}/run", "name=run"])
    context = multiprocessing.get_context("forkserver")
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(config, LaunchOptions(fork_server=context, started=0.0))
    run = read_run(tmp_path / "run")
    assert [event["event"] for event in run.events] == ["launched", "ended"]
    assert run.status == "interrupted"
