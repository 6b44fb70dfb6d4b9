"""Tells nodes that come late, or again, that the run has ended."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.problems.errors import TRANSIENT
from axonlaunch.launch.failures.outcome import Outcome
from axonlaunch.launch.multinode.node_settings import is_elastic, is_first, meeting_port
from axonlaunch.launch.run_folder import finished_runs

TOO_FEW_NODES = "too few nodes"
"""End of a run of which too few nodes came for another attempt."""
_CONNECT_S = 5.0
"""Seconds in which a node 0 that is there takes a connection."""
_BEGIN_S = 60.0
"""Seconds after this node in which a node 0 that is started with it listens."""
_AGAIN_S = 0.5
"""Seconds between two looks for node 0."""


def status_of(outcome: Outcome) -> str:
    """Return what node 0 tells other nodes of the last attempt."""
    if outcome.was_stopped:
        return "interrupted"
    return "done" if outcome.crash is None else "failed"


def exit_status_and_line(status: str, *, address: str) -> tuple[int, str]:
    """Return the exit status of a node that takes no part, and the line that it prints.

    Args:
        status: End of the run according to node 0; empty if node 0 is gone.
        address: Address and port at which the nodes meet.
    """
    if status == "done":
        return 0, f"the run at {address} is done: no step is left for this node"
    if status:
        line = f"the run at {address} has ended ({status}); start all nodes again to resume it"
        # A scheduler that replaces nodes starts this one again, unless the run itself has failed.
        return (1 if status == "failed" else TRANSIENT), line
    return TRANSIENT, f"node 0 at {address} is gone; start all nodes again to resume the run"


def finished_without_node_0(config: RunConfig) -> str | None:
    """Return that a run is finished, on a node that comes when node 0 is gone.

    It is known where the nodes share a folder. Node 0 itself, and a node whose node 0 listens,
    learn it otherwise. Node 0 of a fixed number of nodes waits for all of them, so it gets time to
    begin.
    """
    if is_first(config):
        return None
    with suppress(ConfigError):
        summary = finished_runs.finished_summary(config)
        if summary is not None and not _listens(config):
            return finished_runs.finished_text(config, summary)
    return None


def _listens(config: RunConfig) -> bool:
    """Return whether node 0 is there, or comes in time."""
    address = (config.launch.master_addr, meeting_port(config))
    deadline = time.monotonic() + (0 if is_elastic(config) else _BEGIN_S)
    while True:
        try:
            socket.create_connection(address, timeout=_CONNECT_S).close()
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_AGAIN_S)
        else:
            return True
