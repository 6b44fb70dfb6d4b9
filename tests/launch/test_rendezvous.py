"""The parts of torch's rendezvous that axonlaunch relies on.

If one of these fails after an update of torch, change only ``launch/multinode/rendezvous.py``: look
for moved names in ``torch.distributed.elastic.rendezvous.dynamic_rendezvous``.
"""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
import torch.distributed as dist
from support.command import wait_for
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token

from axonlaunch.launch.multinode import rendezvous
from axonlaunch.launch.multinode.rendezvous import Attempt, ElasticRendezvous, RunEndedError
from axonlaunch.launch.multinode.rendezvous_state import AuthenticatedBackend, from_plain
from axonlaunch.launch.multinode.torch_internals import NodeDescription, RendezvousState
from axonlaunch.system.authentication import Credentials


@pytest.fixture
def port() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    request_port: int = store.port
    _HELD.append(store)
    return request_port


_HELD: list[dist.Store] = []
CREDENTIALS = Credentials.random(sender="")


def rounds(
    port: int, order: int, *, first: bool, most: int = 2, timeout_s: float = 20
) -> ElasticRendezvous:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    return ElasticRendezvous(
        store, CREDENTIALS, first=first, least=2, most=most, order=order, timeout_s=timeout_s
    )


def test_rendezvous_numbers_nodes_and_rounds(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    second, first = rounds(port, 1, first=False), rounds(port, 0, first=True)
    initial_threads = {*threading.enumerate()}
    with ThreadPoolExecutor() as threads:
        for number in (0, 1):
            reported = [*threads.map(ElasticRendezvous.next, (second, first))]
            assert reported == [Attempt(number, 1, 2), Attempt(number, 0, 2)]
    assert len({attempt.name for attempt in (Attempt(0, 0, 2), Attempt(1, 0, 2))}) == 2
    speaking = {*threading.enumerate()} - initial_threads
    assert len(speaking) == 2  # each sends heartbeats
    for node in (second, first):
        node.leave()
    assert not speaking & {*threading.enumerate()}


def test_rendezvous_events_do_not_read_caller_source(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With thousands of modules, reading took so long that nodes never found each other."""

    def stack() -> None:
        raise AssertionError("torch asks inspect for who calls")

    nodes = rounds(port, 1, first=False), rounds(port, 0, first=True)
    monkeypatch.setattr(inspect, "stack", stack)
    with ThreadPoolExecutor() as threads:
        reported = [*threads.map(ElasticRendezvous.next, nodes)]
    assert reported == [Attempt(0, 1, 2), Attempt(0, 0, 2)]
    for node in nodes:
        node.leave()


def test_node_without_network_leaves_without_waiting(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    node = rounds(port, 1, first=False)
    answered = threading.Event()
    monkeypatch.setattr(rendezvous, "stop_heartbeats", lambda handler: answered.wait())
    monkeypatch.setattr(rendezvous, "_KEEP_ALIVE_S", 0.01)
    node.leave()
    assert not answered.is_set()
    answered.set()


@pytest.mark.slow
def test_waiting_node_is_noticed_while_there_is_room(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    first, second = (rounds(port, order, first=not order, most=3) for order in (0, 1))
    with ThreadPoolExecutor() as threads:
        assert [*threads.map(ElasticRendezvous.next, (second, first))] == [
            Attempt(0, 1, 2),
            Attempt(0, 0, 2),
        ]
        assert first.newcomers() == 0
        late = threads.submit(rounds(port, 2, first=False, most=3, timeout_s=5).next)
        wait_for(lambda: first.newcomers() == 1)
        with pytest.raises(TimeoutError):
            late.result()
    for node in (second, first):
        node.leave()


def test_too_few_nodes_are_reported(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    with pytest.raises(TimeoutError):
        rounds(port, 0, first=True, timeout_s=1).next()


@pytest.mark.parametrize("most", [2, 3], ids=["without room", "with room"])
def test_waiting_node_learns_of_run_end_at_once(
    port: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    second, first = (rounds(port, order, first=not order, most=most) for order in (1, 0))
    with ThreadPoolExecutor() as threads:
        [*threads.map(ElasticRendezvous.next, (second, first))]
        again = threads.submit(rounds(port, 2, first=False, most=most, timeout_s=300).next)
        wait_for(lambda: len(first._waiting()) == 1)
        second.leave()
        first.leave("failed")  # the store may end now, because the waiting node has read it
        assert again.done() or again.exception(timeout=0.5) is not None
    ended = again.exception()
    assert isinstance(ended, RunEndedError)
    assert ended.status == "failed"


def test_late_node_learns_of_run_end(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    rounds(port, 0, first=True).leave("done")
    with pytest.raises(RunEndedError) as ended:
        rounds(port, 1, first=False, timeout_s=300).next()
    assert ended.value.status == "done"


def test_waiting_node_learns_of_lost_node_0_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    waiting = rounds(stores[0].port, 1, first=False, timeout_s=300)
    with ThreadPoolExecutor() as threads:
        alone = threads.submit(waiting.next)
        wait_for(lambda: len(waiting._handler._state_holder.state.participants) == 1)
        stores.clear()
        ended = alone.exception(timeout=30)
    assert isinstance(ended, RunEndedError)
    assert ended.status == ""


ANOTHER_CLOCK = """
import pickle
import sys
from datetime import datetime, timedelta
from types import SimpleNamespace

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from axonlaunch.launch.multinode import rendezvous_state
from axonlaunch.launch.multinode.rendezvous import ElasticRendezvous

port, credentials, hours = int(sys.argv[1]), pickle.loads(bytes.fromhex(sys.argv[2])), sys.argv[3]
skew = timedelta(hours=int(hours))
clock = SimpleNamespace(
    now=lambda zone: datetime.now(zone) + skew, fromisoformat=datetime.fromisoformat
)
dynamic_rendezvous.datetime = rendezvous_state.datetime = clock
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
node = ElasticRendezvous(store, credentials, first=False, least=2, most=2, order=1, timeout_s=60)
print([node.next() for attempt in range(2)])
node.leave()
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("hours", [-1, 1])
def test_nodes_with_different_clocks_meet_again(
    port: int, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    arguments = [str(port), pickle.dumps(CREDENTIALS).hex(), str(hours)]
    command = [sys.executable, "-c", ANOTHER_CLOCK, *arguments]
    second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    first = rounds(port, 0, first=True, timeout_s=60)
    try:
        assert [first.next() for attempt in range(2)] == [Attempt(0, 0, 2), Attempt(1, 0, 2)]
        output, _ = second.communicate(timeout=60)
    finally:
        second.kill()
        second.wait()
        first.leave()
    assert output == f"{[Attempt(0, 1, 2), Attempt(1, 1, 2)]}\n"


def test_heartbeats_are_compared_by_the_clock_of_the_node_that_reads_them() -> None:
    """Also those of a node that is silent: it is dropped, however its clock goes."""
    store, node = dist.HashStore(), NodeDescription("node", 1, 0)
    ahead, here = (AuthenticatedBackend(store, CREDENTIALS.with_sender(name)) for name in "ab")
    written = datetime.now(UTC) + timedelta(hours=1)
    state = RendezvousState()
    state.last_heartbeats[node] = written
    ahead.set_state(pickle.dumps(state))

    def read(backend: AuthenticatedBackend) -> tuple[datetime, Token]:
        reply = backend.get_state()
        assert reply is not None
        return pickle.loads(reply[0]).last_heartbeats[node], reply[1]

    first, token = read(here)
    assert abs(datetime.now(UTC) - first) < timedelta(seconds=10)
    state.last_heartbeats[node] = first
    assert here.set_state(pickle.dumps(state), token) is not None
    assert read(here)[0] == first  # silent
    stored = CREDENTIALS.open("rendezvous", store.get("rendezvous"))["state"]
    assert from_plain(stored).last_heartbeats[node] == written
    state.last_heartbeats[node] = read(ahead)[0] + timedelta(seconds=1)
    ahead.set_state(pickle.dumps(state), read(ahead)[1])
    assert read(here)[0] > first
