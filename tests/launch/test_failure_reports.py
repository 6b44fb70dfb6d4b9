"""The rank that is blamed for a failure, and the parts of reports that are shown."""

from __future__ import annotations

import signal
from concurrent import futures
from dataclasses import replace
from pathlib import Path

import pytest

import axonlaunch
from axonlaunch import config
from axonlaunch.diagnostics.failure_text import fold_ranks, plain_ranks
from axonlaunch.diagnostics.flight_recorder import OpenCollective, Record
from axonlaunch.launch.failures.hang import HangLocation, locate, main_stack
from axonlaunch.launch.failures.hints import hint
from axonlaunch.launch.failures.report import Crash, Report, exit_reason
from axonlaunch.launch.failures.root_cause import find_root_cause, is_conclusive
from axonlaunch.launch.output import console
from axonlaunch.launch.output.console import _shown_frames


def report(rank: int, kind: str, reason: str = "") -> Report:
    return Report(rank=rank, kind=kind, reason=reason)  # type: ignore[arg-type]


def test_consequential_failure_is_not_blamed() -> None:
    crash = find_root_cause([report(0, "connection"), report(2, "error"), report(1, "signal")])
    assert crash.first.rank == 1
    assert [rank for rank, _ in crash.followers] == [0, 2]


def test_earliest_of_equal_failures_is_blamed() -> None:
    assert (
        find_root_cause([report(3, "error", "first"), report(1, "error", "second")]).first.rank == 3
    )


def test_report_says_if_every_rank_waits() -> None:
    first = find_root_cause(
        [report(1, "waiting", "waiting in barrier"), report(0, "waiting")]
    ).first
    assert first.reason == "every rank waits for others, this one waiting in barrier"


def test_failure_report_round_trips_between_nodes() -> None:
    crash = find_root_cause([report(0, "connection", "gone"), report(1, "signal", exit_reason(-9))])
    assert Crash.from_json(crash.to_json()) == crash


def test_failure_report_of_later_version_is_readable() -> None:
    text = report(1, "error", "x").to_json()[:-1] + ', "later": 1}'
    assert Report.from_json(text) == report(1, "error", "x")


@pytest.mark.parametrize(
    ("numbers", "reported"),
    [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([5, 0, 1, 7, 6], "ranks 0-1, 5-7")],
)
def test_ranks_are_reported_as_ranges(numbers: list[int], reported: str) -> None:
    assert plain_ranks(numbers) == reported


def test_failures_caused_by_lost_peer_are_folded() -> None:
    reported = fold_ranks(
        (
            (0, "RuntimeError: [x.cc:1] Connection closed by peer [::1]:7"),
            (1, "RuntimeError: [y.cc:2] Read error: Connection reset by peer"),
            (2, "ValueError: bad"),
        ),
        first="ValueError: bad",
    )
    assert reported == [
        "ranks 0-1: lost the connection to a rank that had ended",
        "rank 2: the same",
    ]


def test_torch_frames_are_hidden_except_innermost() -> None:
    torch = '  File "/v/site-packages/torch/nn/modules/module.py", line 1, in _call_impl\n    f()\n'
    user_frame = '  File "/home/me/model.py", line 2, in forward\n    g()\n    ^^^\n'
    head, tail = "Traceback (most recent call last):\n", "ValueError: bad"
    assert _shown_frames(head + torch + user_frame + torch + tail) == (
        head + '  File "/home/me/model.py", line 2, in forward\n    g()\n' + torch + tail
    )


def test_package_frames_are_hidden_only_in_user_errors() -> None:
    ours = f'  File "{Path(console.__file__)}", line 1, in train\n    step()\n'
    python = f'  File "{futures.__file__}", line 2, in result\n    raise self._exception\n'
    user_frame = '  File "/home/me/model.py", line 2, in forward\n    g()\n'
    head, tail = "Traceback (most recent call last):\n", "ValueError: bad"
    assert (
        _shown_frames(head + ours + python + user_frame + ours + tail) == head + user_frame + tail
    )
    assert _shown_frames(head + user_frame + python + tail) == head + user_frame + python + tail
    assert _shown_frames(head + ours + python + tail) == head + ours + python + tail


def waiting(rank: int, *, begun: int, op: str = "", num_bytes: int = 8) -> Report:
    call = OpenCollective(
        group="g", axis="dp", ranks=(0, 1), number=begun, op=op, num_bytes=num_bytes
    )
    record = Record(begun={"g": begun}, open=(call,) if op else ())
    kind = "waiting" if op else "hang"
    return replace(report(rank, kind, "waiting" if op else "it sleeps"), record=record)


def test_rank_missing_from_collective_is_reported() -> None:
    crash = find_root_cause([waiting(0, begun=3, op="all_reduce"), waiting(1, begun=2)])
    assert crash.first.rank == 1
    reported = "waiting: all_reduce 3 of dp (8 bytes), which rank 1 never joined"
    assert crash.followers == ((0, reported),)


def test_ranks_in_different_collectives_of_one_number_are_reported() -> None:
    crash = find_root_cause(
        [waiting(0, begun=3, op="all_reduce"), waiting(1, begun=3, op="broadcast")]
    )
    assert "this one waiting: all_reduce 3 of dp" in crash.first.reason
    assert crash.first.reason.endswith(", where rank 1 is in broadcast of 8 bytes")


def test_uneven_gather_counts_as_one_collective() -> None:
    gathers = [waiting(rank, begun=3, op="all_gather", num_bytes=8 * rank) for rank in (0, 1)]
    assert "where" not in find_root_cause(gathers).first.reason


def test_rank_with_waiting_device_is_not_blamed() -> None:
    ahead = replace(waiting(0, begun=3, op="all_reduce"), kind="hang", reason="it synchronizes")
    crash = find_root_cause([ahead, waiting(1, begun=2)])
    assert crash.first.rank == 1


def test_unresponsive_rank_is_blamed_before_waiting_ranks() -> None:
    """A stopped rank does not answer; on a device its peers' stacks do not help either."""
    ahead = replace(waiting(0, begun=3, op="all_reduce"), kind="hang", reason="it synchronizes")
    crash = find_root_cause([ahead, report(1, "hang", "is stopped")])
    assert crash.first.rank == 1
    assert crash.followers[0][1].endswith("(8 bytes), rank 1 could not be asked")


def test_rank_named_by_waiting_ranks_is_first() -> None:
    elsewhere = replace(waiting(1, begun=2), kind="waiting", reason="waiting in recv")
    crash = find_root_cause([waiting(0, begun=3, op="all_reduce"), elsewhere])
    assert crash.first.rank == 1


def test_rank_in_open_collective_does_not_end_diagnosis() -> None:
    ahead = replace(waiting(0, begun=3, op="all_reduce"), kind="hang")
    assert not is_conclusive([ahead])
    assert is_conclusive([waiting(1, begun=2)])


def test_flight_record_round_trips_between_nodes() -> None:
    sent = waiting(0, begun=3, op="all_reduce")
    assert Report.from_json(sent.to_json()) == sent


STACKS = """
Thread 0x00007f0a (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f0b (most recent call first):
  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 2806 in all_reduce
  File "/v/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/w/axonlaunch/training/trainer.py", line 90 in fit
  File "/w/axonlaunch/launch/local/rank_process.py", line 55 in main
"""


def test_rank_sleeping_in_collective_counts_as_waiting() -> None:
    frames = main_stack(STACKS)
    assert [frame.name for frame in frames] == ["all_reduce", "wrapper", "fit", "main"]
    location = locate(frames, is_asleep=True)
    assert location.is_waiting
    assert location.doing == "waiting in all_reduce, called by fit (training/trainer.py:90)"


def test_rank_in_user_code_does_not_count_as_waiting() -> None:
    user_stacks = STACKS.replace("torch/distributed/distributed_c10d.py", "me/model.py")
    location = locate(main_stack(user_stacks), is_asleep=True)
    assert not location.is_waiting
    assert location.doing == "is in all_reduce (me/model.py:2806)"


def test_output_without_a_rank_has_no_stack() -> None:
    assert main_stack("Fatal Python error\n") == []


def test_a_hang_is_shown_as_its_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    location = HangLocation(False, "is in forward (demo/sleepy.py:11)", "")
    first = location.to_report(report(2, "hang"), timeout_s=8)
    console.show_crash(Crash(first, ()), coords={}, world_size=4)
    page = (Path(axonlaunch.__file__).parent / "docs" / "failures.md").read_text()
    assert all(line in page for line in capsys.readouterr().err.splitlines()[:3])


def test_rank_without_details_shows_only_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.show_crash(Crash(report(0, "error", "it broke"), ()), coords={}, world_size=1)
    assert [line.strip("│ ") for line in capsys.readouterr().err.splitlines()][1:-1] == [
        "rank 0 of 1 failed first: it broke"
    ]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (9, "killed by SIGKILL; the system may have run out of memory"),
        (11, "killed by SIGSEGV; compiled code failed, of torch or of another package"),
        (15, "killed by SIGTERM"),
        (int(signal.SIGRTMIN) + 6, "killed by SIGRTMIN+6"),
    ],
)
def test_signal_that_killed_a_rank_is_named_with_its_likely_cause(number: int, reason: str) -> None:
    assert exit_reason(-number) == reason


def test_truncated_mapped_file_gets_hint(tmp_path: Path) -> None:
    killed = report(0, "signal", exit_reason(-signal.SIGBUS))
    (tmp_path / "a.txt").write_text("text " * 1000)
    keys = ["data=documents", f"data.files=[{tmp_path}/a.txt]", "data.cache_dir=/cache"]
    said = hint(killed, config.load(keys))
    assert "was shortened while it was read (tokens in /cache)" in said
    assert "tokenizes changed files again" in said
    said = hint(killed, config.load(["data=tokens", "data.path=/tokens.bin"]))
    assert "(data.path=/tokens.bin)" in said
