"""A word on a terminal about what a user waits for, gone when it is there.

Where there is no terminal nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spinner(doing: str) -> Iterator[None]:
    """Say on a terminal's standard error what is being done, while it is."""
    from rich.console import Console

    with Console(stderr=True, highlight=False).status(doing):
        yield
