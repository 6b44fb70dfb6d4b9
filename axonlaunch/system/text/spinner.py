"""Shows a temporary status line on a terminal while the user waits.

Nothing is written if standard error is not a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from axonlaunch.system.text.terminal import console_on


@contextmanager
def spinner(doing: str) -> Iterator[Callable[[str], None]]:
    """Show a text and a spinner on standard error; yield a function that replaces the text."""
    from rich.markup import escape

    with console_on(stderr=True).status(doing) as status:
        yield lambda text: status.update(escape(text))
