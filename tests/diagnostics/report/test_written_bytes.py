"""A run's files for its report stay small with any number of ranks."""

from __future__ import annotations

from pathlib import Path

from axonlaunch.diagnostics.report.page_data import page_data
from axonlaunch.diagnostics.report.record.run_record import read_run
from axonlaunch.events import RankTimes, StepLogged
from axonlaunch.training.loggers.event_log import EventLog
from axonlaunch.training.loggers.jsonl import JSONLLogger

RANKS, STEPS = 1000, 20


def test_a_run_of_1000_ranks_that_logs_each_step_writes_less_than_100_bytes_a_step_and_rank(
    tmp_path: Path,
) -> None:
    shares = tuple(0.01 * (rank % 100) for rank in range(RANKS))
    names = tuple(f"worker-{rank // 8:03}.cluster.example.com" for rank in range(RANKS))
    write_metrics = JSONLLogger(tmp_path / "metrics.jsonl", resumed_at=None)
    write_event = EventLog(tmp_path, world_size=RANKS)
    for step in range(1, STEPS + 1):
        logged = StepLogged(
            step, 2.3456789, 1e-3, 0.98765, 4096, 123456.7, 0.033, 2**35, 0.1, 10**9
        )
        for event in (logged, RankTimes(step, names, shares, shares, shares, shares)):
            write_metrics(event)
            write_event(event)
    written = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert written / STEPS / RANKS < 100
    ranks = page_data([read_run(tmp_path)])["runs"][0]["ranks"]
    assert (len(ranks["steps"]), len(ranks["worked"][0])) == (STEPS, RANKS)
