"""Saves in the background: from a copy, one at a time, and every failure is reported."""

from __future__ import annotations

import threading
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support import saver_checks

from axonlaunch.checkpoint.saving.save_progress import SharedProgress
from axonlaunch.system.processes import forked_call


def on_ranks(folder: Path, check: str) -> list[Any]:
    """Run a function of ``saver_checks`` on gloo ranks; return each rank's result."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["axonlaunch.launch.local.preload"])
    calls = [(rank, str(folder), check) for rank in range(saver_checks.RANKS)]
    return forked_call.call_together(context, "support.saver_checks:on_rank", calls)


@pytest.mark.processes
def test_background_save_writes_the_state_at_its_start(tmp_path: Path) -> None:
    for values, steps in on_ranks(tmp_path, "changing"):
        assert values == [1.0] * 8
        assert steps == [1]


def test_one_save_is_in_flight_at_most(tmp_path: Path) -> None:
    for first, second in on_ranks(tmp_path, "twice"):
        assert first == []
        assert second == [1]


def test_rank_waiting_for_a_slower_rank_reports_progress(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, "waiting") == [[1], [1]]


def test_save_without_writes_reports_no_progress() -> None:
    moved = threading.Event()
    store = dist.HashStore()
    with SharedProgress(store, "save", moved=moved.set, interval_s=0.001) as progress:
        assert not moved.wait(0.05)
        with SharedProgress(store, "save", moved=lambda: None, interval_s=0.001) as other:
            other.wrote()
            assert moved.wait(30)
        moved.clear()
        progress.wrote()
        assert moved.wait(30)


def test_failed_save_is_an_error_on_every_rank_and_keeps_the_previous_checkpoint(
    tmp_path: Path,
) -> None:
    for reported, steps in on_ranks(tmp_path, "failing"):
        assert "step_2 could not be written: rank 1: OSError: " in reported
        assert steps == [1]


def test_early_ranks_create_nothing_while_the_main_rank_sweeps(tmp_path: Path) -> None:
    main, other = on_ranks(tmp_path, "early")
    assert main == ([False], [1])
    assert other == ([], [1])


@pytest.mark.slow
def test_background_save_frees_its_host_copy(tmp_path: Path) -> None:
    for (at_once, after), (beside, afterwards) in on_ranks(tmp_path, "measured"):
        assert at_once < 0.2
        assert 0.9 < beside < 1.2
        assert max(after, afterwards) < 0.1
