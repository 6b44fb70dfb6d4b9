"""Detects whether a thread waits for other ranks, from its Python frames and whether it sleeps.

This works only on a CPU, because the host does not see what a GPU stream waits for.
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
"""Files between a call of an operation and its implementation, which are ignored."""


def waits(files: Iterable[str], *, is_asleep: bool) -> bool:
    """Return whether a thread waits for other ranks.

    It does if it sleeps in code that communicates: in torch, in autograd's engine (its hooks reduce
    gradients), or in this package. A thread that sleeps in user code does not wait for ranks.

    Args:
        files: Files of the thread's frames, innermost first.
        is_asleep: Whether the operating system reports the thread as sleeping.
    """
    innermost = next((file for file in files if not is_passed_through(file)), "")
    return is_asleep and bool(_WAITING.search(innermost))


def is_passed_through(file: str) -> bool:
    """Return whether frames of a file only pass an operation on."""
    return bool(_PASSED_THROUGH.search(file))
