"""What passes between the parent and a rank's process; torch-free, for the parent is.

Events of the run and reports of failures travel beside these.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonlaunch.events import Finished
from axonlaunch.launch.local.heartbeat import HeartbeatTable
from axonlaunch.system.authentication import Credentials


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """Where a rank is to be, and how it finds the others.

    Attributes:
        rank: Among ``world_size``.
        world_size: Ranks of the run.
        local_rank: Among ``local_world_size``.
        local_world_size: Ranks on this node.
        master_addr: Where the ranks meet.
        port: Of the rendezvous there.
        credentials: What this rank signs with. They come here by inheritance alone.
        listener: The bound socket for the rank that is to listen, None elsewhere; no port is ever
            free for others to take.
        log: File that takes what this process prints.
        heartbeats: Where it says how far it is, at ``local_rank``.
        threads: For the CPU's parallel loops.
        cores: This rank's share of the node; None leaves the choice to the system.
        restarted: Whether this is a later attempt at the run, from its own last checkpoint on.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    port: int
    credentials: Credentials
    listener: Any
    log: Path
    heartbeats: HeartbeatTable
    threads: int
    cores: tuple[int, ...] | None
    restarted: bool = False


@dataclass(frozen=True)
class Done:
    """The end of a rank's work."""

    rank: int
    finished: Finished
