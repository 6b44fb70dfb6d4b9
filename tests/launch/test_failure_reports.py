"""Which rank is blamed for a failure, and which parts of the reports are shown."""

from __future__ import annotations

import signal
from concurrent import futures
from dataclasses import replace
from pathlib import Path

import pytest

import axonlaunch
from axonlaunch import config
from axonlaunch.diagnostics.flight_recorder import OpenCollective, Record
from axonlaunch.launch.failures.hang import HangLocation, locate, main_stack
from axonlaunch.launch.failures.hints import hint
from axonlaunch.launch.failures.report import Crash, Report, exit_reason, plain_ranks
from axonlaunch.launch.failures.root_cause import find_root_cause, is_conclusive
from axonlaunch.launch.output import console
from axonlaunch.launch.output.console import _fold_ranks, _shown_frames


def report(rank: int, kind: str, reason: str = "") -> Report:
    return Report(rank=rank, kind=kind, reason=reason)  # type: ignore[arg-type]


def test_an_echo_is_not_blamed_though_it_came_first() -> None:
    crash = find_root_cause([report(0, "connection"), report(2, "error"), report(1, "signal")])
    assert crash.first.rank == 1
    assert [rank for rank, _ in crash.followers] == [0, 2]


def test_of_equal_failures_the_earliest_is_blamed() -> None:
    assert (
        find_root_cause([report(3, "error", "first"), report(1, "error", "second")]).first.rank == 3
    )


def test_where_every_rank_waits_it_is_said() -> None:
    first = find_root_cause(
        [report(1, "waiting", "waiting in barrier"), report(0, "waiting")]
    ).first
    assert first.reason == "every rank waits for others, this one waiting in barrier"


def test_what_travels_between_nodes_is_read_back() -> None:
    crash = find_root_cause([report(0, "connection", "gone"), report(1, "signal", exit_reason(-9))])
    assert Crash.from_json(crash.to_json()) == crash


def test_a_report_of_a_later_version_is_read_by_this_one() -> None:
    text = report(1, "error", "x").to_json()[:-1] + ', "later": 1}'
    assert Report.from_json(text) == report(1, "error", "x")


@pytest.mark.parametrize(
    ("numbers", "reported"),
    [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([5, 0, 1, 7, 6], "ranks 0-1, 5-7")],
)
def test_ranks_are_reported_in_runs(numbers: list[int], reported: str) -> None:
    assert plain_ranks(numbers) == reported


def test_what_a_lost_peer_caused_is_folded_and_the_rest_is_not() -> None:
    reported = _fold_ranks(
        (
            (0, "RuntimeError: [x.cc:1] Connection closed by peer [::1]:7"),
            (1, "RuntimeError: [y.cc:2] Read error: Connection reset by peer"),
            (2, "ValueError: bad"),
        )
    )
    assert reported == [
        ("ranks 0-1", "lost the connection to a rank that had ended"),
        ("rank 2", "ValueError: bad"),
    ]


def test_torchs_own_frames_are_left_out_but_for_the_innermost() -> None:
    torch = '  File "/v/site-packages/torch/nn/modules/module.py", line 1, in _call_impl\n    f()\n'
    own = '  File "/home/me/model.py", line 2, in forward\n    g()\n    ^^^\n'
    head, tail = "Traceback (most recent call last):\n", "ValueError: bad"
    assert _shown_frames(head + torch + own + torch + tail) == (
        head + '  File "/home/me/model.py", line 2, in forward\n    g()\n' + torch + tail
    )


def test_our_own_frames_and_pythons_are_left_out_of_a_users_error_alone() -> None:
    ours = f'  File "{Path(console.__file__)}", line 1, in train\n    step()\n'
    python = f'  File "{futures.__file__}", line 2, in result\n    raise self._exception\n'
    theirs = '  File "/home/me/model.py", line 2, in forward\n    g()\n'
    head, tail = "Traceback (most recent call last):\n", "ValueError: bad"
    assert _shown_frames(head + ours + python + theirs + ours + tail) == head + theirs + tail
    assert _shown_frames(head + theirs + python + tail) == head + theirs + python + tail
    assert _shown_frames(head + ours + python + tail) == head + ours + python + tail


def waiting(rank: int, *, begun: int, op: str = "", num_bytes: int = 8) -> Report:
    call = OpenCollective(
        group="g", axis="dp", ranks=(0, 1), number=begun, op=op, num_bytes=num_bytes
    )
    record = Record(begun={"g": begun}, open=(call,) if op else ())
    kind = "waiting" if op else "hang"
    return replace(report(rank, kind, "waiting" if op else "it sleeps"), record=record)


def test_who_never_came_to_a_collective_is_reported() -> None:
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


def test_ranks_that_gather_uneven_parts_are_in_one_collective() -> None:
    gathers = [waiting(rank, begun=3, op="all_gather", num_bytes=8 * rank) for rank in (0, 1)]
    assert "where" not in find_root_cause(gathers).first.reason


def test_a_rank_whose_device_waits_is_not_blamed_though_its_own_code_is_elsewhere() -> None:
    ahead = replace(waiting(0, begun=3, op="all_reduce"), kind="hang", reason="it synchronizes")
    crash = find_root_cause([ahead, waiting(1, begun=2)])
    assert crash.first.rank == 1


def test_a_rank_that_can_not_report_is_blamed_before_those_that_wait_for_it() -> None:
    """A stopped rank does not answer; on a device its peers' stacks do not help either."""
    ahead = replace(waiting(0, begun=3, op="all_reduce"), kind="hang", reason="it synchronizes")
    crash = find_root_cause([ahead, report(1, "hang", "is stopped")])
    assert crash.first.rank == 1
    assert crash.followers[0][1].endswith("(8 bytes), rank 1 could not be asked")


def test_where_all_wait_the_one_that_others_name_is_first() -> None:
    elsewhere = replace(waiting(1, begun=2), kind="waiting", reason="waiting in recv")
    crash = find_root_cause([waiting(0, begun=3, op="all_reduce"), elsewhere])
    assert crash.first.rank == 1


def test_a_rank_in_an_open_collective_is_not_the_last_word_of_a_node() -> None:
    ahead = replace(waiting(0, begun=3, op="all_reduce"), kind="hang")
    assert not is_conclusive([ahead])
    assert is_conclusive([waiting(1, begun=2)])


def test_a_record_travels_between_nodes() -> None:
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


def test_who_sleeps_in_a_collective_waits_in_it() -> None:
    frames = main_stack(STACKS)
    assert [frame.name for frame in frames] == ["all_reduce", "wrapper", "fit", "main"]
    where = locate(frames, is_asleep=True)
    assert where.is_waiting
    assert where.doing == "waiting in all_reduce, called by fit (training/trainer.py:90)"


def test_who_is_in_code_of_its_own_does_not_wait() -> None:
    own = STACKS.replace("torch/distributed/distributed_c10d.py", "me/model.py")
    where = locate(main_stack(own), is_asleep=True)
    assert not where.is_waiting
    assert where.doing == "is in all_reduce (me/model.py:2806)"


def test_a_stack_of_no_rank_is_none() -> None:
    assert main_stack("Fatal Python error\n") == []


def test_a_hang_is_shown_as_its_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    location = HangLocation(False, "is in forward (demo/sleepy.py:11)", "")
    first = location.to_report(report(2, "hang"), timeout_s=8)
    console.show_crash(Crash(first, ()), coords={}, world_size=4)
    page = (Path(axonlaunch.__file__).parent / "docs" / "failures.md").read_text()
    assert all(line in page for line in capsys.readouterr().err.splitlines()[:3])


def test_of_a_rank_of_which_nothing_else_is_known_the_reason_alone_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.show_crash(Crash(report(0, "error", "it broke"), ()), coords={}, world_size=1)
    assert [line.strip("│ ") for line in capsys.readouterr().err.splitlines()][1:-1] == [
        "rank 0 of 1 failed first: it broke"
    ]


def test_a_rank_whose_mapped_files_were_shortened_gets_a_hint(tmp_path: Path) -> None:
    killed = report(0, "signal", exit_reason(-signal.SIGBUS))
    (tmp_path / "a.txt").write_text("text " * 1000)
    keys = ["data=documents", f"data.files=[{tmp_path}/a.txt]", "data.cache_dir=/cache"]
    said = hint(killed, config.load(keys))
    assert "was shortened while it was read (tokens in /cache)" in said
    assert "tokenizes changed files again" in said
    said = hint(killed, config.load(["data=tokens", "data.path=/tokens.bin"]))
    assert "(data.path=/tokens.bin)" in said
