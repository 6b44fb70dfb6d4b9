"""Decides with torch's rendezvous which nodes take part in an attempt at a run, and their order.

A run with a fixed number of nodes begins without a rendezvous. The parts of torch that implement
``torchrun`` are used only in this module and in ``torch_internals``;
``tests/launch/test_rendezvous.py`` says what to do if they change.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from axonlaunch.comm.connection.authenticated_store import AuthenticatedStore, Channel
from axonlaunch.launch.multinode.rendezvous_state import AuthenticatedBackend
from axonlaunch.launch.multinode.torch_internals import (
    has_all,
    name_methods_by_frame,
    round_of,
    stop_heartbeats,
    waiting_nodes,
)
from axonlaunch.system.authentication import Credentials, ForgedMessageError

_KEEP_ALIVE_S, _MISSED = 1, 4
"""Seconds between heartbeats, and the number of missed ones after which a node is dropped."""
_LAST_CALL_S = 5
"""Seconds in which more nodes may join after the minimum number has joined."""
_TOLD_S = 10.0
"""Seconds that node 0 stays for waiting nodes to read that the run has ended."""
_ENDED, _TOLD = "ended", "told"


class RunEndedError(Exception):
    """The run ended before this node could take part.

    Attributes:
        status: End of the run according to node 0: "done", "failed", "interrupted" or "too few
            nodes"; empty if node 0 is gone and left no message.
    """

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.status = status


class NodeLostError(Exception):
    """A node of an attempt was lost before the attempt began."""


@dataclass(frozen=True)
class Attempt:
    """An attempt at a run.

    Attributes:
        number: Round of the rendezvous.
        member: Number of this node in the attempt.
        members: Number of nodes in the attempt.
    """

    number: int
    member: int
    members: int

    @property
    def name(self) -> str:
        """Prefix of the attempt's keys in the store."""
        return f"round{self.number}"


class ElasticRendezvous:
    """Forms the attempts at a run, on one node."""

    def __init__(
        self,
        store: dist.Store,
        credentials: Credentials,
        *,
        first: bool,
        least: int,
        most: int,
        order: int,
        timeout_s: float,
    ) -> None:
        """Prepare to take part, without contacting the other nodes yet.

        Args:
            store: Part of the store that only this run uses; used only by this object.
            credentials: Credentials of the run.
            first: Whether this node hosts the store; that node leads every attempt.
            least: Minimum number of nodes.
            most: Maximum number of nodes.
            order: Number of this node, or 0 if unknown.
            timeout_s: Seconds to wait for the minimum number of nodes.
        """
        # Each attempt here has separate keys, which torch's shared store would not have.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
        name_methods_by_frame()
        # torch numbers nodes in the order of their addresses, so this name determines the order.
        name = f"{0 if first else 1}-{order:06}-{socket.gethostname()}"
        credentials = credentials.with_sender(name)
        self._handler = DynamicRendezvousHandler.from_backend(
            run_id="run",
            store=AuthenticatedStore(store, credentials),
            backend=AuthenticatedBackend(store, credentials),
            min_nodes=least,
            max_nodes=most,
            local_addr=name,
            timeout=RendezvousTimeout(
                join=timedelta(seconds=timeout_s),
                last_call=timedelta(seconds=_LAST_CALL_S),
                heartbeat=timedelta(seconds=_KEEP_ALIVE_S * _MISSED),
            ),
            keep_alive_interval=_KEEP_ALIVE_S,
            keep_alive_max_attempt=_MISSED,
        )
        self._first, self._name = first, name
        self._messages = Channel(store, credentials)

    def next(self) -> Attempt:
        """Wait for enough nodes and begin an attempt.

        Raises:
            TimeoutError: Too few nodes joined in time.
            RunEndedError: The run has ended, or ends during the wait.
        """
        try:
            info = self._handler.next_rendezvous()
        except RendezvousTimeoutError as error:
            raise TimeoutError(str(error)) from error
        except (RendezvousClosedError, RendezvousGracefulExitError) as error:
            raise RunEndedError(self._read_end()) from error
        except RendezvousConnectionError as error:
            raise RunEndedError("") from error
        number = round_of(self._handler)
        return Attempt(number, info.rank, info.world_size)

    def newcomers(self) -> int:
        """Return the number of nodes that wait to join the next attempt."""
        return int(self._handler.num_nodes_waiting())

    def confirm(self, attempt: Attempt) -> None:
        """Check that an attempt, which has not begun yet, can begin.

        Raises:
            NodeLostError: A node of it was lost.
            RunEndedError: Node 0 is gone.
        """
        try:
            self._handler.num_nodes_waiting()  # which reads the state
        except RendezvousConnectionError as error:
            raise RunEndedError("") from error
        if not has_all(self._handler, attempt.number, attempt.members):
            raise NodeLostError

    def leave(self, status: str = "done", *, stay_s: float = 0.0) -> None:
        """Stop this node's heartbeats. The first node also tells later nodes how the run ended.

        The heartbeat thread keeps the handler alive, so only this call ends it. If the network is
        gone, stopping it may block forever, so the wait is limited.

        Args:
            status: End of the run, for nodes that wait or come now: "done", "failed",
                "interrupted" or "too few nodes".
            stay_s: Seconds that the first node waits for nodes that come.
        """
        if self._first:
            self._messages.put(_ENDED, status)
            waiting = self._waiting()
            self._handler.shutdown()
            time.sleep(stay_s)
            self._wait_until_told(waiting)
        else:
            stopping = threading.Thread(target=stop_heartbeats, args=(self._handler,), daemon=True)
            stopping.start()
            stopping.join(timeout=_KEEP_ALIVE_S * _MISSED)

    def _waiting(self) -> list[str]:
        """Return the names of the nodes that wait to take part."""
        try:
            self._handler.num_nodes_waiting()  # which reads the state
        except RendezvousConnectionError:
            return []
        return [name for name in waiting_nodes(self._handler) if name != self._name]

    def _wait_until_told(self, waiting: list[str]) -> None:
        """Keep the store, which ends with this process, until waiting nodes know of the end."""
        told = [f"{_TOLD} {name}" for name in waiting]
        until = time.monotonic() + _TOLD_S
        with suppress(dist.DistStoreError, dist.DistNetworkError):
            while told and not self._messages.check(told) and time.monotonic() < until:
                time.sleep(0.05)

    def _read_end(self) -> str:
        """Return how node 0 said that the run ended, and let it know that this node knows."""
        try:
            status = str(self._messages.get(_ENDED)) if self._messages.check([_ENDED]) else ""
            self._messages.put(f"{_TOLD} {self._name}", None)
        except (dist.DistStoreError, dist.DistNetworkError, ForgedMessageError):
            return ""
        return status
