"""Rich consoles without emoji codes and syntax highlighting.

Printed text often comes from users, such as paths or targets like ``package:X:``, and must not be
changed.
"""

from __future__ import annotations

import sys
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

    if is_notebook() and options.get("force_terminal") is None:
        options["force_terminal"] = False  # ipykernel sets FORCE_COLOR, which rich obeys
    return Console(file=stream, highlight=False, emoji=False, force_jupyter=False, **options)


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which shows only plain lines."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and bool(kernel.IPKernelApp.initialized())
