"""Which nodes take part in an attempt at a run, and in which order: torch's rendezvous decides.

A run whose nodes are all known begins without it. The parts of torch that stand behind
``torchrun`` are used here alone; ``tests/launch/test_rendezvous.py`` says what
to do when they move.
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

from axonlaunch.comm.authenticated_store import AuthenticatedStore, Channel
from axonlaunch.launch.multinode.rendezvous_state import AuthenticatedBackend
from axonlaunch.launch.multinode.torch_internals import (
    name_methods_by_frame,
    round_of,
    stop_heartbeats,
    waiting_nodes,
)
from axonlaunch.system.authentication import Credentials, ForgedMessageError

_KEEP_ALIVE_S, _MISSED = 1, 4
"""A node that says nothing for their product is not waited for any more."""
_LAST_CALL_S = 5
"""Seconds in which more nodes may join once the fewest have come."""
_TOLD_S = 10.0
"""Seconds in which nodes that wait read that the run has ended; they look once a second."""
_ENDED, _TOLD = "ended", "told"


class RunEndedError(Exception):
    """The run ended before this node could take part.

    Attributes:
        status: How, as node 0 said it: "done", "failed" or "interrupted"; empty where node 0 is
            gone and said nothing.
    """

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True)
class Attempt:
    """An attempt at a run.

    Attributes:
        number: Of the rendezvous.
        member: Which of its nodes this one is.
        members: How many there are.
    """

    number: int
    member: int
    members: int

    @property
    def name(self) -> str:
        """What the keys of the attempt begin with."""
        return f"round{self.number}"


class ElasticRendezvous:
    """The attempts at one run, for one node."""

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
        """Prepare to take part; nothing is said to the others yet.

        Args:
            store: Where the nodes meet, under what is the run's alone; used here alone.
            credentials: Of the run.
            first: Whether this is the node of the store, which leads every attempt.
            least: The fewest nodes.
            most: The most.
            order: Which node this is, where that is known.
            timeout_s: Seconds to wait for the fewest.
        """
        # Each attempt has keys of its own here; the store that torch would share has not.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
        name_methods_by_frame()
        # It counts nodes in the order of what it takes for their addresses.
        name = f"{0 if first else 1}-{order:06}-{socket.gethostname()}"
        credentials = credentials.of(name)
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
        """Wait for enough nodes, and begin an attempt.

        Raises:
            TimeoutError: Too few came.
            RunEndedError: The run has ended, or ends meanwhile.
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
        """Return how many nodes came since the attempt began, and wait for the next."""
        return int(self._handler.num_nodes_waiting())

    def leave(self, status: str = "done", *, stay_s: float = 0.0) -> None:
        """Say no more that this node is there; the first tells others that the run has ended.

        The thread that says it holds what would end it, so that it ends by this alone. Where the
        network is gone, it may never return from what it says, and is not waited for.

        Args:
            status: How the run ended, for nodes that wait or come now.
            stay_s: Seconds in which the first node waits for nodes that come.
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
        return waiting_nodes(self._handler)

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
