"""Finds and watches the process of torchrun, mpirun or srun that started this rank.

If the launcher is killed, its ranks keep running, so they watch it. Ranks that a user starts by
hand watch nothing, because their shell may end, for example after ``nohup``.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from pathlib import Path

from axonlaunch.launch.environment.environment_variables import OPEN_MPI, PMI, SLURM, LaunchIdentity
from axonlaunch.system.processes.process_state import state

GRACE_S = 8.0
"""Seconds between the launcher's end and the end of this process, in which it can be reported."""
_POLL_S = 0.5
_SET_BY = {
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "mpirun": (OPEN_MPI.rank, PMI.rank),
    "srun": (SLURM.rank,),
}
"""Environment variables that a launcher sets for each rank but does not have itself."""


class LauncherProcess:
    """The launcher of this rank.

    Attributes:
        name: ``torchrun``, ``mpirun`` or ``srun``.
        pid: Process id; None if the launcher is outside of this container or is a user's shell.
        is_gone: Set when the launcher has ended.
        identity: Identity of the run across its starts by this launcher.
    """

    def __init__(self, name: str) -> None:
        """Find the launcher's process."""
        self.name = name
        self.pid = _ancestor_without(_SET_BY.get(name, ()))
        self.is_gone = threading.Event()
        since = "" if self.pid is None else "".join(_stat(self.pid)[19:20])
        launcher = f"{name} {self.pid} of {socket.gethostname()} since {since}" if since else ""
        self.identity = LaunchIdentity.detect(os.environ, launcher=launcher)
        if self.pid is None and name == "mpirun" and _is_unread(1):
            self.is_gone.set()  # it was killed before this process could look for it

    def watch(self) -> None:
        """Watch the launcher in a thread, and end this process ``GRACE_S`` after its end."""
        if self.pid is not None or self.is_gone.is_set():
            threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        try:
            if self.pid is not None:
                _wait_for_end(self.pid)
            self.is_gone.set()
            time.sleep(GRACE_S)
        finally:  # a failure of this thread ends the process too
            os._exit(1)


def _is_unread(descriptor: int) -> bool:
    """Return whether a pipe or terminal has no reader any more; mpirun reads its ranks' output."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _ancestor_without(variables: tuple[str, ...]) -> int | None:
    """Return the nearest ancestor process that does not have any of the variables.

    Processes between the launcher and this one, such as a shell or ``taskset``, have inherited the
    variables: ``mpirun`` (without) -> ``sh -c`` (with) -> this process.
    """
    pid = os.getppid()
    while variables and pid > 1:
        try:
            content = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            return None
        except PermissionError:  # another user's process: slurmstepd runs as root
            return pid
        names = {line.partition(b"=")[0] for line in content}
        if not names & {name.encode() for name in variables}:
            return pid
        parent = _stat(pid)[1:2]
        pid = int(parent[0]) if parent else 0
    return None


def _wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # Linux before 5.3, or a container that forbids it
        start_time = _stat(pid)[19:20]
        while state(pid) not in ("", "Z") and _stat(pid)[19:20] == start_time:
            time.sleep(_POLL_S)
        return
    try:
        select.select([descriptor], [], [])
    finally:
        os.close(descriptor)


def _stat(pid: int) -> list[str]:
    """Return a process's stat fields after its name: state, parent, ..., start time at index 19."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
