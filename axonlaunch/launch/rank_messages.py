"""What passes between the parent and a rank's process; torch-free, for the parent is.

Events of the run travel beside these.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonlaunch.events import Finished


@dataclass(frozen=True)
class Place:
    """Where a rank is to be, and how it finds the others.

    Attributes:
        rank: Among ``world_size``.
        world_size: Ranks of the run, all on this machine.
        port: Of the rendezvous, on loopback.
        listener: Rank 0's bound socket, None elsewhere; no port is ever free for others to take.
        log: File that takes what this process prints.
        threads: For the CPU's parallel loops.
        cores: This rank's share of the machine; None leaves the choice to the system.
    """

    rank: int
    world_size: int
    port: int
    listener: Any
    log: Path
    threads: int
    cores: tuple[int, ...] | None


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank.

    Attributes:
        rank: Whose it was.
        kind: Name of its class.
        message: Its text.
        traceback: All of it, as Python prints it.
        is_connection: Whether it only says that another rank was gone.
    """

    rank: int
    kind: str
    message: str
    traceback: str
    is_connection: bool


@dataclass(frozen=True)
class Done:
    """The end of a rank's work."""

    rank: int
    finished: Finished
