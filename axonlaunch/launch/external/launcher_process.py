"""The process of torchrun, mpirun or srun that started this one as a rank, watched.

A launcher that is killed can't end its ranks, and they belong to init from then on. Ranks that a
person starts by hand are not watched: the shell may leave, as after ``nohup``.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from pathlib import Path

from axonlaunch.launch.environment_variables import OPEN_MPI, PMI, SLURM, LaunchIdentity
from axonlaunch.system.process_state import state

GRACE_S = 8.0
"""Seconds that whoever trains has to report the launcher's end; then the process ends."""
_POLL_S = 0.5
_SET_BY = {
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "mpirun": (OPEN_MPI.rank, PMI.rank),
    "srun": (SLURM.rank,),
}
"""Variables that a launcher sets for each rank and does not have itself."""


class LauncherProcess:
    """The launcher of this rank.

    Attributes:
        name: ``torchrun``, ``mpirun`` or ``srun``.
        pid: None where it is not seen: out of this container, or a person's shell.
        is_gone: Set when it has ended.
        identity: What is the same in all of its starts of this run.
    """

    def __init__(self, name: str) -> None:
        """Look for it."""
        self.name = name
        self.pid = _ancestor_without(_SET_BY.get(name, ()))
        self.is_gone = threading.Event()
        began = "" if self.pid is None else "".join(_stat(self.pid)[19:20])
        itself = f"{name} {self.pid} of {socket.gethostname()} since {began}" if began else ""
        self.identity = LaunchIdentity.detect(os.environ, launcher=itself)
        if self.pid is None and name == "mpirun" and _is_unread(1):
            self.is_gone.set()  # it was killed before this process could look for it

    def watch(self) -> None:
        """Watch the launcher in a thread, and end this process some seconds after it ended."""
        if self.pid is not None or self.is_gone.is_set():
            threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        try:
            if self.pid is not None:
                _wait_for_end(self.pid)
            self.is_gone.set()
            time.sleep(GRACE_S)
        finally:  # a watch that fails ends its process too
            os._exit(1)


def _is_unread(descriptor: int) -> bool:
    """Say whether nobody reads a pipe or a terminal any more, as mpirun does its ranks'."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _ancestor_without(variables: tuple[str, ...]) -> int | None:
    """Return the nearest ancestor that was started without any of the variables.

    What lies between, a shell or ``taskset`` that the launcher ran, inherited them and passed them
    on: ``mpirun`` (has none) -> ``sh -c`` (has them) -> this process.
    """
    pid = os.getppid()
    while variables and pid > 1:
        try:
            content = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except FileNotFoundError:
            return None
        except PermissionError:  # of another user: slurmstepd is root's
            return pid
        names = {line.partition(b"=")[0] for line in content}
        if not names & {name.encode() for name in variables}:
            return pid
        pid = int(_stat(pid)[1])
    return None


def _wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # Linux before 5.3, or a container that forbids it
        began = _stat(pid)[19:20]
        while state(pid) not in ("", "Z") and _stat(pid)[19:20] == began:
            time.sleep(_POLL_S)
        return
    try:
        select.select([descriptor], [], [])
    finally:
        os.close(descriptor)


def _stat(pid: int) -> list[str]:
    """Return a process' fields after its name: state, parent, ..., at 19 when it began."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
