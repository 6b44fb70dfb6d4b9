"""A node that was asked to stop ends the run on all nodes, even if the run fails meanwhile."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from support.command import wait_for

from axonlaunch.comm.connection.authenticated_store import Channel
from axonlaunch.launch.failures.outcome import Outcome
from axonlaunch.launch.failures.report import Crash, Report
from axonlaunch.launch.local.supervisor import Rank, Supervisor
from axonlaunch.launch.multinode import coordination
from axonlaunch.launch.multinode.coordination import Coordinator
from axonlaunch.launch.multinode.handshake import handshake, member_name
from axonlaunch.system.authentication import Credentials, derive_key

FAILED = Report(rank=0, kind="error", reason="no space left")


@pytest.fixture
def nodes() -> list[Coordinator]:
    """Return two connected nodes."""
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members: list[Coordinator] = []
    for member in (1, 0):
        store = dist.TCPStore("127.0.0.1", master.port, timeout=timedelta(seconds=20))
        credentials = Credentials(
            key=derive_key(b"a secret"), run="run", round=1, sender=member_name(member)
        )
        channel = Channel(store, credentials)
        _, nonces = handshake(
            channel,
            member=member,
            members=2,
            unit="rank",
            about={},
            timeout_s=20,
            announce=lambda text: None,
            confirm=lambda: None,
        )
        members.append(
            Coordinator(
                channel,
                nonces=nonces,
                member=member,
                members=2,
                first_ranks=[0, 1],
                lost_s=60,
                are_nodes=True,
            )
        )
    members.reverse()
    members[0].master = master  # type: ignore[attr-defined]  # it listens for as long as this lives
    return members


def test_members_wait_as_long_as_member_0_prepares(nodes: list[Coordinator]) -> None:
    lead, other = nodes
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(other.wait_for, "frozen", timeout_s=3.0)
        with lead.preparing():
            time.sleep(4.0)
            assert not waiting.done()
        lead.publish("frozen", {"config": "ours"})
        assert waiting.result() == {"config": "ours"}
    with pytest.raises(TimeoutError):  # the signs of life have ended
        other.wait_for("another", timeout_s=0.5)


@pytest.mark.parametrize("stopped", [0, 1])
def test_stop_request_reaches_every_node_with_root_cause(
    stopped: int, nodes: list[Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordination, "_SETTLE_S", 0.0)
    lead, other = nodes
    lead.watch()
    wait_for(lambda: lead._heard)  # the heartbeat of the other's handshake
    other.watch()
    nodes[stopped].request_stop()
    wait_for(lead.is_stopping)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(other.root_cause, [])
        assert lead.root_cause([FAILED]).first == FAILED
        assert waiting.result().first == FAILED
    assert other.is_stopping()


class _Others:
    """Other nodes of a run: one of them fails after this node was asked to stop."""

    def __init__(self, *, is_stopping: bool = False) -> None:
        self.was_asked = is_stopping

    def failure(self) -> bool:
        return self.was_asked

    def root_cause(self, reports: list[Report]) -> Crash:
        del reports
        return Crash(FAILED, ())

    def request_stop(self) -> None:
        self.was_asked = True

    def is_stopping(self) -> bool:
        return self.was_asked

    def is_awaited(self) -> bool:
        return False


def follow(others: _Others, *, is_requested: bool) -> Outcome:
    """Follow a rank that never ends; ``is_requested`` says whether its node gets a stop request."""
    process = SimpleNamespace(
        has_ended=True, pid=1, signal=lambda _: None, kill_group=lambda: None, join=lambda: None
    )
    connection = SimpleNamespace(close=lambda: None, poll=lambda: True)
    rank = Rank(0, 0, cast("Any", process), cast("Any", connection), Path("rank_0.log"))
    supervisor = Supervisor(
        ranks=[rank],
        heartbeats=cast("Any", None),
        timeout_s=60,
        report=lambda event: None,
        tick=lambda: signal.raise_signal(signal.SIGTERM) if is_requested else None,
        announce=lambda line: None,
        others=cast("Any", others),
    )
    supervisor._listen = lambda **_: None  # type: ignore[method-assign]
    supervisor._hanging = list  # type: ignore[method-assign]
    return supervisor.run()


def test_stop_request_is_sent_to_other_nodes() -> None:
    others = _Others()
    assert follow(others, is_requested=True).was_stopped
    assert others.was_asked


def test_a_run_that_fails_while_another_node_stops_it_was_stopped() -> None:
    assert follow(_Others(is_stopping=True), is_requested=False).was_stopped
