"""A line on a terminal that says what the user waits for, and disappears afterwards.

Where there is no terminal nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from axonlaunch.system.terminal import console_on


@contextmanager
def spinner(doing: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal's standard error what is being done; yield what updates the text."""
    from rich.markup import escape

    with console_on(stderr=True).status(doing) as status:
        yield lambda text: status.update(escape(text))
