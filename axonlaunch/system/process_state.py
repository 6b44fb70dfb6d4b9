"""What Linux reports of a process or a thread; elsewhere nothing is known, and said to be so."""

from __future__ import annotations

from pathlib import Path


def state(pid: int, thread: int | None = None) -> str:
    """Return the letter by which Linux reports what a thread does; empty where it reports nothing.

    Args:
        pid: A process.
        thread: One of its threads; None is the first.
    """
    try:
        content = Path(f"/proc/{pid}/task/{thread or pid}/stat").read_text()
        return content.rpartition(")")[2].split()[0]
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
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None
