"""An attacker on the network without the run's token can end the run, and nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support import stranger
from support.command import TINY, Command, wait_for
from support.launchers import SUPPORT
from support.served import Server
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from axonlaunch.comm.connection.authenticated_store import Channel
from axonlaunch.launch.failures.report import Crash
from axonlaunch.launch.multinode import run_identity
from axonlaunch.launch.multinode.coordination import Coordinator
from axonlaunch.launch.multinode.handshake import handshake, member_name
from axonlaunch.launch.multinode.rendezvous import Attempt, ElasticRendezvous
from axonlaunch.launch.multinode.rendezvous_state import AuthenticatedBackend, as_plain, from_plain
from axonlaunch.system.authentication import Credentials, ForgedMessageError, derive_key

TOKEN = b"a secret of sixteen bytes or more"


@pytest.fixture
def master() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def joined(master: Any) -> Any:
    """Connect to a store without a token."""
    timeout = timedelta(seconds=20)
    return dist.TCPStore("127.0.0.1", master.port, is_master=False, timeout=timeout)


def rounds(master: Any, order: int) -> ElasticRendezvous:
    credentials = Credentials(key=derive_key(TOKEN), run="run", sender="")
    return ElasticRendezvous(
        joined(master),
        credentials,
        first=not order,
        least=2,
        most=2,
        order=order,
        timeout_s=60,  # on a busy machine
    )


def test_forged_rendezvous_pickle_is_never_loaded(
    master: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    payload = stranger.bomb(tmp_path / "executed")
    nodes = [rounds(master, order) for order in (1, 0)]
    [key] = [key for key in master.list_keys() if key.endswith("rendezvous")]
    master.set(key, payload)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(nodes[1].next)
        wait_for(lambda: master.get(key) != payload)
        master.set(key, payload)
        assert nodes[0].next() == Attempt(0, 1, 2)
        assert first.result() == Attempt(0, 0, 2)
    assert not (tmp_path / "executed").exists()


def test_replayed_rendezvous_state_is_refused(master: Any) -> None:
    credentials = Credentials(key=derive_key(TOKEN), run="run", sender="node")
    backend = AuthenticatedBackend(joined(master), credentials)
    states = []
    for number in range(2):
        state = _RendezvousState()
        state.round = number
        states.append(pickle.dumps(state))
    first = backend.set_state(states[0], None)
    assert first is not None
    assert first[2]
    old = master.get("rendezvous")
    second = backend.set_state(states[1], first[1])
    assert second is not None
    master.set("rendezvous", old)
    now = backend.get_state()
    assert now is not None
    assert pickle.loads(now[0]).round == 1
    written = backend.set_state(states[1], now[1])  # the replayed state is replaced
    assert written is not None
    assert written[2]


def test_rendezvous_state_round_trips_without_pickle() -> None:
    """If this fails after an update of torch, ``launch/multinode/rendezvous_state.py`` lacks a
    field.
    """
    state, now = _RendezvousState(), datetime.now(UTC)
    first, second, third = (_NodeDesc(f"node {number}", 10 + number, 0) for number in range(3))
    state.round, state.complete, state.closed, state.deadline = 3, True, True, now
    state.participants = {second: 1, first: 0}
    state.wait_list, state.redundancy_list = {third}, {third}
    state.last_heartbeats = {first: now, third: now}
    read = from_plain(json.loads(json.dumps(as_plain(state))))
    assert vars(read) == vars(state)
    assert vars(from_plain(as_plain(_RendezvousState()))) == vars(_RendezvousState())


def channels(master: Any, members: int = 2, **about: Any) -> list[Channel]:
    credentials = Credentials(key=derive_key(TOKEN), run="run", round=1, sender="")
    return [
        Channel(
            joined(master),
            dataclasses.replace(credentials, sender=member_name(member), **about),
        )
        for member in range(members)
    ]


def met(channel: Channel, member: int, *, confirm: Any = lambda: None) -> list[str]:
    _, nonces = handshake(
        channel,
        member=member,
        members=2,
        unit="rank",
        about={},
        timeout_s=5,
        announce=lambda text: None,
        confirm=confirm,
    )
    return nonces


def peers(
    channel: Channel, member: int, nonces: list[str], *, lost_s: float = 5, are_nodes: bool = True
) -> Coordinator:
    return Coordinator(
        channel,
        nonces=nonces,
        member=member,
        members=2,
        first_ranks=[0, 1],
        lost_s=lost_s,
        are_nodes=are_nodes,
    )


def test_forged_configuration_is_refused(master: Any) -> None:
    lead, other = channels(master)
    second = peers(other, 1, met(other, 1))
    attacker = joined(master)
    fake = Credentials(key=derive_key(b"a guess"), run="run", round=1, sender=member_name(0))
    content = {"nonces": [], "value": {"config": "model: {target: os.system}"}}
    attacker.set("frozen", fake.seal("frozen", content))
    with pytest.raises(ForgedMessageError, match="not signed with this run's token"):
        second.wait_for("frozen", timeout_s=5)
    first = peers(lead, 0, met(lead, 0))
    first.publish("frozen", {"config": "ours"})
    assert second.wait_for("frozen", timeout_s=5) == {"config": "ours"}


def test_replayed_message_of_other_start_round_or_key_is_refused(master: Any) -> None:
    lead, other = channels(master)
    earlier = met(other, 1)
    first = peers(lead, 0, met(lead, 0))
    first.publish("frozen", {"config": "old"})
    again = peers(other, 1, met(other, 1))  # after a restart, the old answer has another nonce
    with pytest.raises(ForgedMessageError, match="for an earlier start of this node"):
        again.wait_for("frozen", timeout_s=5)
    assert peers(other, 1, earlier).wait_for("frozen", timeout_s=5) == {"config": "old"}
    [_, later] = channels(master, round=2)
    with pytest.raises(ForgedMessageError, match="was written for another round"):
        later.get("frozen")
    [_, elsewhere] = channels(master, run="another")
    with pytest.raises(ForgedMessageError, match="was written for another run"):
        elsewhere.get("frozen")
    master.set("root_cause", master.get("frozen"))
    with pytest.raises(ForgedMessageError, match="was written for another name"):
        other.get("root_cause")
    with pytest.raises(ForgedMessageError, match="was written for another sender"):
        other.get("joined/1", sender=member_name(0))


def test_replayed_heartbeat_is_ignored(master: Any) -> None:
    lead, other = channels(master)
    nonces = met(other, 1)
    first, second = peers(lead, 0, met(lead, 0)), peers(other, 1, nonces)
    second._send_heartbeat(1)
    old = master.get("heartbeat/1")
    second._send_heartbeat(2)
    first._poll_members()
    heard_at = first._heard_at[1]
    master.set("heartbeat/1", old)
    first._poll_members()
    assert first._heard_at[1] == heard_at


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("are_nodes", [False, True])
def test_ending_node_does_not_wait_for_silent_member(
    master: Any, silent: int, are_nodes: bool
) -> None:
    first, second = channels(master)
    nonces = met(second, 1)
    both = [(first, 0, met(first, 0)), (second, 1, nonces)]
    lead, other = [
        peers(*member, lost_s=0.8, are_nodes=are_nodes)  # type: ignore[misc]
        for member in both
    ]
    waiting, other = (other, lead) if silent == 0 else (lead, other)
    other._send_heartbeat(1)  # only one: the node is stopped, or its thread has died
    waiting.watch()
    ended = waiting.finish([])
    assert isinstance(ended, Crash)
    assert ended.first.rank == silent
    assert "no heartbeat from its" in ended.first.reason


def test_dead_listener_thread_ends_waiting(master: Any) -> None:
    lead, other = channels(master)
    nonces = met(other, 1)
    first, second = peers(lead, 0, met(lead, 0)), peers(other, 1, nonces)

    def fault() -> None:
        raise MemoryError

    for member in (first, second):
        member._flush = fault  # type: ignore[method-assign]
        member.watch()
    for member in (first, second):
        assert isinstance(member.finish([]), Crash)


def test_overwritten_store_key_does_not_block_node_0(
    master: Any,
) -> None:
    named = run_identity.publish_identity(joined(master), derive_key(TOKEN))
    [lead, _] = channels(master)
    attacker, store = joined(master), joined(master)
    attacker.delete_key("axonlaunch/run")
    run_identity.keep_identity(store, named)
    assert run_identity.learn(attacker, derive_key(TOKEN), timeout_s=5) == named
    attacker.set("axonlaunch/run", b"a stranger's")
    with pytest.raises(ForgedMessageError, match="not signed with this run's token"):
        met(lead, 0, confirm=partial(run_identity.keep_identity, store, named))


def test_deleted_message_does_not_block(master: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axonlaunch.launch.multinode.handshake._ANSWER_S", 0.2)
    [lead, _] = channels(master)
    attacker = joined(master)
    with pytest.raises(ForgedMessageError, match="joined/0: a stranger deleted it"):
        met(lead, 0, confirm=lambda: attacker.delete_key("joined/0"))
    monkeypatch.setattr(lead, "check", lambda names: True)  # deleted just afterwards
    with pytest.raises(ForgedMessageError, match="joined/1: was deleted"):
        met(lead, 0)


def test_run_name_is_signed_and_store_does_not_reveal_token(
    master: Any,
) -> None:
    run_identity.publish_identity(joined(master), derive_key(TOKEN))
    with pytest.raises(ForgedMessageError):
        run_identity.learn(joined(master), derive_key(b"another token"), timeout_s=5)
    named = run_identity.learn(joined(master), derive_key(TOKEN), timeout_s=5)
    keys = run_identity.keys_of(joined(master), named, "round-1")
    Channel(keys, named.with_sender(member_name(0))).put("frozen", {})
    stored = b"".join(key.encode() + master.get(key) for key in master.list_keys())
    for secret in (TOKEN, derive_key(TOKEN), hashlib.sha256(TOKEN).digest()):
        assert secret not in stored
        assert secret.hex().encode() not in stored


def test_fork_server_socket_is_private(server: Server) -> None:
    folder = Path(server["_forkserver_address"]).parent
    assert folder.stat().st_mode & 0o077 == 0
    assert folder.stat().st_uid == os.geteuid()


def beset(command: Command, kind: str, amount: int, *overrides: str) -> tuple[int, str]:
    """Train with an attacker at every port that opens; return status and errors."""
    program = [sys.executable, str(SUPPORT / "stranger.py"), kind, "127.0.0.1", str(amount)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as neighbor:
        assert neighbor.stdout is not None
        assert neighbor.stdout.readline() == "ready\n"
        process = command.start("train", *TINY, "strategy=fsdp", "launch.nproc=2", *overrides)
        try:
            log = command.folder / "runs/run/logs/rank_0.log"
            wait_for(lambda: log.exists() or process.returncode is not None)
            _, errors = process.communicate(timeout=60)
        finally:
            neighbor.kill()
    return process.returncode, errors


@pytest.mark.slow
def test_run_under_port_attack_trains_correctly_or_names_unreachable_rank(
    served: Command,
) -> None:
    served("train", *TINY, "strategy=fsdp", "launch.nproc=2", "name=alone")
    status, errors = beset(served, "rob", 90, "name=run")
    if status == 0:
        assert served.losses("run") == served.losses("alone")
        return
    reported = " ".join(errors.replace("│", " ").split())
    assert "UnreachableRankError: rank" in reported
    assert "Traceback" not in reported


@pytest.mark.slow
def test_ten_thousand_noise_connections_do_not_harm_start(served: Command) -> None:
    served("train", *TINY, "strategy=fsdp", "launch.nproc=2", "name=alone")
    status, errors = beset(served, "noise", 10_000, "name=run")
    assert status == 0, errors
    assert served.losses("run") == served.losses("alone")
