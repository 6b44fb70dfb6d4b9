"""Ends a process when its parent ends."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGKILL) -> Callable[[], None]:
    """Return a function that, called in a new process, ends it when its parent ends.

    Linux sends the signal when the thread that created the process ends. On other systems the
    function does nothing. Call this before a fork and the result after it, because loading a
    library in the new process can wait forever for a lock of another thread.

    Args:
        number: Signal that the process gets when its parent ends.
    """
    if sys.platform != "linux":
        return lambda: None
    control = ctypes.CDLL(None).prctl

    def request() -> None:
        control(_PR_SET_PDEATHSIG, number)

    return request
