"""Determines from a file path if a stack frame is in this package, torch, Python or user code.

Only the path is used, because the frame may be from an ended process or from another node.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path
from typing import Literal, TypeAlias

Owner: TypeAlias = Literal["axonlaunch", "torch", "python", "user"]

_THIS_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
_STDLIB = f"{sysconfig.get_path('stdlib')}{os.sep}"
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_TORCH = re.compile(_INSTALLED.pattern + r"torch[/\\]")


def frame_owner(file: str) -> Owner:
    """Return the owner of a file; all packages except torch and this one count as user code.

    Args:
        file: File name of a frame. Generated code, such as ``<string>``, counts as Python's.
    """
    if file.startswith(_THIS_PACKAGE):
        return "axonlaunch"
    if _TORCH.search(file):
        return "torch"
    is_generated = file.startswith("<") and file.endswith(">")
    if is_generated or (file.startswith(_STDLIB) and not _INSTALLED.search(file)):
        return "python"
    return "user"


def place_in_user_code(error: BaseException) -> str:
    """Return the innermost line of user code in the traceback of an error: `` (FILE:LINE)``.

    User files take precedence over installed packages: if ``build`` in ``models.py`` calls a
    library that fails, the result is the line in ``models.py``.

    Returns:
        Text to append to a message; empty if the traceback has no frame of user code.
    """
    files = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    users = [(file, line) for file, line in files if frame_owner(file) == "user"]
    not_installed = [(file, line) for file, line in users if not _INSTALLED.search(file)]
    if not users:
        return ""
    file, line = (not_installed or users)[-1]
    return f" ({file}:{line})"
