"""Whose code a frame of a stack runs: this package's, torch's, Python's, or somebody else's.

It goes by the file's path alone: the frame may be of a process that is gone, or of another node.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path
from typing import Literal, TypeAlias

Owner: TypeAlias = Literal["axonlaunch", "torch", "python", "user"]

_OURS = f"{Path(__file__).parent.parent}{os.sep}"
_PYTHONS = f"{sysconfig.get_path('stdlib')}{os.sep}"
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")
_TORCHS = re.compile(_PACKAGES.pattern + r"torch[/\\]")


def frame_owner(file: str) -> Owner:
    """Return whose code a file is; a user's is also that of any other package.

    Args:
        file: As frames name it. Code that was made and not read, ``<string>``, is Python's.
    """
    if file.startswith(_OURS):
        return "axonlaunch"
    if _TORCHS.search(file):
        return "torch"
    made = file.startswith("<") and file.endswith(">")
    if made or (file.startswith(_PYTHONS) and not _PACKAGES.search(file)):
        return "python"
    return "user"


def place_in_user_code(error: BaseException) -> str:
    """Return where a user's code raised an error, or called what did: `` (FILE:LINE)``.

    The innermost frame of a user's own file goes before one of an installed package: where
    ``build`` of ``models.py`` calls a library that fails, the line in ``models.py`` is shown.

    Returns:
        Text to append to a message; empty where the stack has no frame of a user's.
    """
    files = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    users = [(file, line) for file, line in files if frame_owner(file) == "user"]
    own = [(file, line) for file, line in users if not _PACKAGES.search(file)]
    if not users:
        return ""
    file, line = (own or users)[-1]
    return f" ({file}:{line})"
