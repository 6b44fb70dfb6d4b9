"""What the system lets a process have; nothing here asks for more than it allows."""

from __future__ import annotations

import resource

_FILES = 65536
"""More than a node's ranks need, which connect each to each."""


def address_space() -> int | None:
    """Return how many bytes a process may map (``ulimit -v``); None: as many as it wants.

    What is mapped is much more than what is used: libraries and the stacks of threads count too.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def allow_open_files() -> None:
    """Raise the number of files that this process, and what it starts, may have open.

    The limit that shells set (1,024, on macOS 256) is for programs that use ``select``; what the
    administrator allows is the hard one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
