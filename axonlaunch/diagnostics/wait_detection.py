"""Whether a thread waits for other ranks, judged by where its Python code is and whether it sleeps.

On a CPU only: what a stream of a GPU waits for is not seen from the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_WAITING = re.compile(
    r"[/\\]torch[/\\](distributed[/\\]|autograd[/\\]graph\.py)"
    r"|[/\\]axonlaunch[/\\](comm[/\\]|engines[/\\]|training[/\\]trainer\.py)"
)
_PASSED_THROUGH = re.compile(
    r"[/\\]torch[/\\](_ops|_compile|_library[/\\]\w+|_dynamo[/\\]eval_frame|utils[/\\]_\w+)\.py"
    r"|[/\\]axonlaunch[/\\]planning[/\\]tracing[/\\]storage_trace\.py"
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
