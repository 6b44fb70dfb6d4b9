"""A line on a terminal that says what the user waits for, and disappears afterwards.

Where there is no terminal nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def spinner(doing: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal's standard error what is being done; yield what updates the text."""
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True, highlight=False).status(doing) as status:
        yield lambda text: status.update(escape(text))
