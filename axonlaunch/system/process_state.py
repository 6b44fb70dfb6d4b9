"""What Linux reports of a process or a thread; elsewhere nothing is known, and said to be so."""

from __future__ import annotations

import os
from pathlib import Path


def state(pid: int, thread: int | None = None) -> str:
    """Return the letter by which Linux reports what a thread does; empty where it reports nothing.

    Args:
        pid: A process.
        thread: One of its threads; None is the first.
    """
    try:
        return _letter(Path(f"/proc/{pid}/task/{thread or pid}/stat").read_bytes())
    except (OSError, IndexError):
        return ""


def queued_s(thread: int) -> float | None:
    """Return for how long a thread of this process was ready to run and got no core.

    Other processes, more ranks than cores or a quota of a container had them.

    Args:
        thread: Its native id.

    Returns:
        Seconds since it started, by Linux's ``schedstat``; None where none is reported.
    """
    try:
        return _waited_s(Path(f"/proc/self/task/{thread}/schedstat").read_bytes())
    except (OSError, IndexError, ValueError):
        return None


class WatchedThread:
    """A thread of this process that is looked at often: its files are opened once."""

    def __init__(self, thread: int) -> None:
        """Open them.

        Args:
            thread: Its native id.

        Raises:
            OSError: Linux reports nothing of it.
        """
        folder = Path(f"/proc/self/task/{thread}")
        self._files = [os.open(folder / name, os.O_RDONLY) for name in ("stat", "schedstat")]

    def look(self) -> tuple[str, float]:
        """Return what ``state`` and ``queued_s`` do.

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
