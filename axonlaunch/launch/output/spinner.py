"""A word on a terminal about what a user waits for, gone when it is there.

Where there is no terminal nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def spinner(doing: str) -> Iterator[Callable[[str], None]]:
    """Say on a terminal's standard error what is being done, while it is; give what says more."""
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True, highlight=False).status(doing) as status:
        yield lambda text: status.update(escape(text))
