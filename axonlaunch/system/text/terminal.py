"""Rich consoles without emoji codes and syntax highlighting.

Printed text often comes from users, such as paths or targets like ``package:X:``, and must not be
changed.
"""

from __future__ import annotations

import os
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

    if options.get("force_terminal") is None:
        # rich also takes FORCE_COLOR for a terminal. ipykernel and many CI jobs set it, and each
        # frame of a spinner or of a progress bar would be a line of their logs.
        target = stream or (sys.stderr if options.get("stderr") else sys.stdout)
        options["force_terminal"] = target.isatty() and not is_notebook()
        if os.environ.get("FORCE_COLOR") and not is_notebook():
            options.setdefault("color_system", "standard")
    return Console(file=stream, highlight=False, emoji=False, force_jupyter=False, **options)


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which shows only plain lines."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and bool(kernel.IPKernelApp.initialized())
