"""The state of torch's rendezvous, kept in a store as signed JSON.

torch pickles its state and unpickles what the store returns. Here it is given only pickles that
this process just made, of a state read from JSON; what stands in the store otherwise is replaced.
"""

from __future__ import annotations

import pickle
from datetime import datetime
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from axonlaunch.launch.multinode.torch_internals import NodeDescription, RendezvousState
from axonlaunch.system.authentication import Credentials, ForgedMessageError

_NAME = "rendezvous"
_EMPTY = b"-"
"""What stands there first: reading a key that is not set would wait."""


class AuthenticatedBackend(RendezvousBackend):
    """Where the nodes of a run keep the state of their rendezvous.

    Each state is numbered, and one with a lower number than was seen before is a replay.
    """

    def __init__(self, store: dist.Store, credentials: Credentials) -> None:
        self._store: Any = store
        self._credentials = credentials
        self._number = 0  # the highest seen
        self._last: dict[str, Any] | None = None
        self._stands = self._call("compare_set", _NAME, b"", _EMPTY)

    @property
    def name(self) -> str:
        """What torch calls it in its events."""
        return "axonlaunch"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state, pickled, and what stands for it in the store."""
        return self._read(self._call("get", _NAME))

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Write a state where ``token`` still stands; return what then is there, and whether.

        Args:
            state: As torch pickled it, in this process.
            token: What was read before; None: nothing was.
        """
        content = {"number": self._number + 1, "state": as_plain(pickle.loads(state))}
        sealed = self._credentials.seal(_NAME, content)
        expected = self._stands if token is None else token
        current = self._read(self._call("compare_set", _NAME, expected, sealed))
        return None if current is None else (*current, self._stands == sealed)

    def _read(self, stands: bytes) -> tuple[bytes, Token] | None:
        """Return the state that stands there, or the last one where a stranger wrote over it.

        What a stranger wrote is the token then, so that the next ``set_state`` replaces it.
        """
        self._stands = stands
        try:
            content = self._credentials.open(_NAME, stands)
            if content["number"] < self._number:
                raise ForgedMessageError(f"{_NAME}: an earlier state")
            state = from_plain(content["state"])
            self._number, self._last = content["number"], content["state"]
        except (ForgedMessageError, KeyError, TypeError, ValueError):
            if self._last is None:
                return None
            state = from_plain(self._last)
        return pickle.dumps(state), stands

    def _call(self, operation: str, *arguments: Any) -> bytes:
        try:
            result: bytes = getattr(self._store, operation)(*arguments)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the store is gone") from error
        return result


def as_plain(state: RendezvousState) -> dict[str, Any]:
    """Write a state as plain values, its nodes numbered."""
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
    """Read what ``as_plain`` wrote.

    Raises:
        KeyError, TypeError, ValueError: It is not such.
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
