"""Rich consoles without emoji codes and syntax highlighting.

Printed text often comes from users, such as paths or targets like ``package:X:``, and must not be
changed.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console_on(stream: IO[str] | None = None, **options: Any) -> Console:
    """Return a rich console.

    Args:
        stream: Output stream; None selects standard output.
        options: Other options of ``rich.console.Console``.
    """
    from rich.console import Console  # takes 40 ms, and a command may print only JSON

    # In a notebook, plain lines: rich would send HTML and needs ipywidgets for a status line.
    return Console(file=stream, highlight=False, emoji=False, force_jupyter=False, **options)
