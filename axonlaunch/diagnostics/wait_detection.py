"""Whether a thread waits for other ranks, judged by where its Python code is and whether it sleeps.

On a CPU only: what a stream of a GPU waits for is not seen from the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_WAITING = re.compile(
    r"[/\\]torch[/\\](distributed[/\\]|autograd[/\\]graph\.py)"
    r"|[/\\]axonlaunch[/\\](comm[/\\]|engines[/\\]|trainer\.py)"
)
_PASSED_THROUGH = re.compile(
    r"[/\\]torch[/\\](_ops|_compile|_library[/\\]\w+|_dynamo[/\\]eval_frame|utils[/\\]_\w+)\.py"
    r"|[/\\]axonlaunch[/\\]planning[/\\]trace\.py"
)
"""What stands between a call of an operation and its work, and says nothing of what it is."""


def waits(files: Iterable[str], *, is_asleep: bool) -> bool:
    """Return whether a thread waits for other ranks.

    It sleeps in the code that communicates: torch's, autograd's engine (whose hooks reduce
    gradients), or ours. A sleep in a user's own code is the rank's own.

    Args:
        files: Of the thread's frames, the innermost first.
        is_asleep: Whether the system says so.
    """
    innermost = next((file for file in files if not is_passed_through(file)), "")
    return is_asleep and bool(_WAITING.search(innermost))


def is_passed_through(file: str) -> bool:
    """Return whether a frame of a file only hands an operation on."""
    return bool(_PASSED_THROUGH.search(file))


def state(pid: int, thread: int | None = None) -> str:
    """Return the letter by which Linux tells what a thread does; empty where it tells nothing.

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
        Seconds since it started, by Linux's ``schedstat``; None where the system does not tell.
    """
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None
