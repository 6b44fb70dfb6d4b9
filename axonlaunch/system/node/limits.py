"""Resource limits of this process."""

from __future__ import annotations

import resource

_FILES = 65536
"""Number of open files that suffices for the ranks of a node, which all connect to each other."""


def address_space() -> int | None:
    """Return the maximum address space in bytes (``ulimit -v``); None if it is unlimited.

    The address space is much larger than the memory in use: libraries and thread stacks count too.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def allow_open_files() -> None:
    """Raise the limit of open files for this process and its child processes.

    The usual soft limit (1,024, on macOS 256) exists for programs that use ``select``. The hard
    limit is the administrator's.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
