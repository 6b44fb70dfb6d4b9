"""Consoles that print text as it is: no emoji for ``:x:``, and no colours of rich's own choice.

What is printed is often a user's: paths, and targets such as ``package:X:``.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console_on(stream: IO[str] | None = None, **options: Any) -> Console:
    """Return a console of rich.

    Args:
        stream: Where it prints; None: standard output.
        options: Others of ``rich.console.Console``.
    """
    from rich.console import Console  # takes 40 ms, and a command may print JSON alone

    return Console(file=stream, highlight=False, emoji=False, **options)
