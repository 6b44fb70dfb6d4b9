"""Keeps the state of torch's rendezvous in a store as signed JSON.

torch pickles its state and unpickles the value in the store. This backend reads JSON from the store
and gives torch only pickles that this process has created. Other content is replaced.

torch compares the heartbeats of other nodes with the clock of this one. Clocks of nodes differ, so
torch gets the local time at which each heartbeat was first read.
"""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from axonlaunch.launch.multinode.torch_internals import NodeDescription, RendezvousState
from axonlaunch.system.authentication import Credentials, ForgedMessageError

_NAME = "rendezvous"
_EMPTY = b"-"
"""Initial value of the key, because reading an unset key would block."""


class AuthenticatedBackend(RendezvousBackend):
    """Stores the state of a run's rendezvous.

    States are numbered. A state with a lower number than an earlier one is rejected as a replay.
    """

    def __init__(self, store: dist.Store, credentials: Credentials) -> None:
        self._store: Any = store
        self._credentials = credentials
        self._number = 0  # highest number so far
        self._last: dict[str, Any] | None = None
        # Each node's last heartbeat by the node's clock, and when it was read by this one's.
        self._heartbeats: dict[NodeDescription, tuple[datetime, datetime]] = {}
        self._stored = self._call("compare_set", _NAME, b"", _EMPTY)

    @property
    def name(self) -> str:
        """Name of the backend in torch's events."""
        return "axonlaunch"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the pickled state and its value in the store as a token."""
        return self._read(self._call("get", _NAME))

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Write a state if the stored value is still ``token``.

        Args:
            state: State pickled by torch in this process.
            token: Token from the last read; None if nothing was read.

        Returns:
            The state in the store afterwards, its token, and whether ``state`` was written.
        """
        written = self._with_times_of_nodes(pickle.loads(state))
        content = {"number": self._number + 1, "state": as_plain(written)}
        sealed = self._credentials.seal(_NAME, content)
        expected = self._stored if token is None else token
        current = self._read(self._call("compare_set", _NAME, expected, sealed))
        return None if current is None else (*current, self._stored == sealed)

    def _read(self, stored: bytes) -> tuple[bytes, Token] | None:
        """Return the stored state, or the last valid one if the stored value is forged.

        The token is the stored value even if it is forged, so the next ``set_state`` replaces it.
        """
        self._stored = stored
        try:
            content = self._credentials.open(_NAME, stored)
            if content["number"] < self._number:
                raise ForgedMessageError(f"{_NAME}: an earlier state")
            state = from_plain(content["state"])
            self._number, self._last = content["number"], content["state"]
        except (ForgedMessageError, KeyError, TypeError, ValueError):
            if self._last is None:
                return None
            state = from_plain(self._last)
        return pickle.dumps(self._with_local_times(state)), stored

    def _with_local_times(self, state: RendezvousState) -> RendezvousState:
        """Set each heartbeat to the local time at which it was first read."""
        now = datetime.now(UTC)
        for node, at in state.last_heartbeats.items():
            if node not in self._heartbeats or self._heartbeats[node][0] != at:
                self._heartbeats[node] = at, now
            state.last_heartbeats[node] = self._heartbeats[node][1]
        return state

    def _with_times_of_nodes(self, state: RendezvousState) -> RendezvousState:
        """Set heartbeats that this node has read to the times that were read."""
        for node, at in state.last_heartbeats.items():
            if node in self._heartbeats and self._heartbeats[node][1] == at:
                state.last_heartbeats[node] = self._heartbeats[node][0]
        return state

    def _call(self, operation: str, *arguments: Any) -> bytes:
        try:
            result: bytes = getattr(self._store, operation)(*arguments)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the store is gone") from error
        return result


def as_plain(state: RendezvousState) -> dict[str, Any]:
    """Return a state as plain values, with nodes referred to by number."""
    nodes = sorted(
        {*state.participants, *state.wait_list, *state.redundancy_list, *state.last_heartbeats}
    )
    number = {node: index for index, node in enumerate(nodes)}
    return {
        "nodes": [[node.addr, node.pid, node.local_id] for node in nodes],
        "round": state.round,
        "complete": state.complete,
        "deadline": state.deadline and state.deadline.isoformat(),
        "closed": state.closed,
        "participants": [[number[node], rank] for node, rank in state.participants.items()],
        "wait_list": sorted(number[node] for node in state.wait_list),
        "redundancy_list": sorted(number[node] for node in state.redundancy_list),
        "last_heartbeats": [
            [number[node], at.isoformat()] for node, at in state.last_heartbeats.items()
        ],
    }


def from_plain(content: dict[str, Any]) -> RendezvousState:
    """Return the state from the output of ``as_plain``.

    Raises:
        KeyError, TypeError, ValueError: The content is not such an output.
    """
    nodes = [
        NodeDescription(str(addr), int(pid), int(local)) for addr, pid, local in content["nodes"]
    ]
    deadline = content["deadline"]
    state = RendezvousState()
    state.round, state.complete = int(content["round"]), bool(content["complete"])
    state.deadline = None if deadline is None else datetime.fromisoformat(deadline)
    state.closed = bool(content["closed"])
    state.participants = {nodes[index]: int(rank) for index, rank in content["participants"]}
    state.wait_list = {nodes[index] for index in content["wait_list"]}
    state.redundancy_list = {nodes[index] for index in content["redundancy_list"]}
    state.last_heartbeats = {
        nodes[index]: datetime.fromisoformat(at) for index, at in content["last_heartbeats"]
    }
    return state
