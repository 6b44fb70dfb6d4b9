"""Whose code a frame of a stack runs: this package's, torch's, Python's, or somebody else's.

It goes by the file's path alone: the frame may be of a process that is gone, or of another node.
"""

from __future__ import annotations

import os
import re
import sysconfig
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
