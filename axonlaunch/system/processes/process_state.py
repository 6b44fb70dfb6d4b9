"""Reads the state of processes and threads from Linux's ``/proc``; unknown on other systems."""

from __future__ import annotations

import os
from pathlib import Path


def state(pid: int, thread: int | None = None) -> str:
    """Return Linux's state letter of a thread; empty if it is not reported.

    Args:
        thread: Native id of a thread of the process; None selects the main thread.
    """
    try:
        return _letter(Path(f"/proc/{pid}/task/{thread or pid}/stat").read_bytes())
    except (OSError, IndexError):
        return ""


def queued_s(thread: int) -> float | None:
    """Return how long a thread of this process was ready to run but waited for a core.

    Possible reasons are other processes, more ranks than cores, or a container's CPU quota.

    Args:
        thread: Native id of the thread.

    Returns:
        Total seconds since the thread started, from Linux's ``schedstat``; None if not reported.
    """
    try:
        return _waited_s(Path(f"/proc/self/task/{thread}/schedstat").read_bytes())
    except (OSError, IndexError, ValueError):
        return None


class WatchedThread:
    """A thread of this process with open ``/proc`` files, for frequent reading."""

    def __init__(self, thread: int) -> None:
        """Open the files.

        Args:
            thread: Native id of the thread.

        Raises:
            OSError: There are no such files for the thread.
        """
        folder = Path(f"/proc/self/task/{thread}")
        self._files = [os.open(folder / name, os.O_RDONLY) for name in ("stat", "schedstat")]

    def look(self) -> tuple[str, float]:
        """Return the results of ``state`` and ``queued_s``.

        Raises:
            OSError: The thread has ended.
        """
        stat, schedstat = (os.pread(file, 1024, 0) for file in self._files)
        return _letter(stat), _waited_s(schedstat)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            os.close(file)


def _letter(stat: bytes) -> str:
    return stat.rpartition(b")")[2].split()[0].decode()


def _waited_s(schedstat: bytes) -> float:
    return int(schedstat.split()[1]) / 1e9
