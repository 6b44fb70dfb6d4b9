"""Names processes as ``ps``, ``top`` and ``nvidia-smi`` show them."""

from __future__ import annotations

import os
from typing import Any


def name_process(text: str) -> None:
    """Give this process a title, ``axonlaunch: TEXT``."""
    _setproctitle().setproctitle(f"axonlaunch: {text}")


def _setproctitle() -> Any:
    # On Linux the library writes over the environment in memory, which /proc/PID/environ shows and
    # which torchrun's ranks read of their parent, unless this variable is set at its first use.
    os.environ["SPT_NOENV"] = "1"
    try:
        import setproctitle

        setproctitle.getproctitle()
    finally:
        del os.environ["SPT_NOENV"]
    return setproctitle
