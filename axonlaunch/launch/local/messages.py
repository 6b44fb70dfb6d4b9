"""Messages between the parent and a rank's process.

The module imports no torch, because the parent does not. Events and failure reports are sent over
the same connection.
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
    """Describes one rank: its numbers, its rendezvous and its share of the node.

    Attributes:
        rank: Global rank, below ``world_size``.
        world_size: Number of ranks of the run.
        local_rank: Rank on this node, below ``local_world_size``.
        local_world_size: Number of ranks on this node.
        master_addr: Address of the rendezvous.
        port: Port of the rendezvous.
        credentials: Credentials with which this rank signs messages. A process only inherits them;
            they are never sent.
        listener: Bound socket for the rank that listens; None for other ranks. The parent holds the
            port until then, so no other process can take it.
        log: File that receives the output of this process.
        heartbeats: Table in which the rank reports its progress, at index ``local_rank``.
        threads: Number of threads for parallel loops on the CPU.
        cores: CPU cores of this rank; None leaves the choice to the system.
        restarted: Whether this is a later attempt that starts from the run's last checkpoint.
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
    """Reports that a rank has finished its work."""

    rank: int
    finished: Finished
