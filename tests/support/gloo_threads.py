"""Lets gloo's threads free the buffers of a collective before its rank continues.

A thread of gloo wakes the rank that waits for a collective, and frees the buffers after that. On a
busy machine the rank allocates in between, and its memory has a higher peak.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_LOOKS = 2
"""Consecutive looks that must find all threads idle, because one may have to wait for the GIL."""
_PAUSE_S = 1e-4
_MOST_S = 100.0


@contextmanager
def freeing_at_once() -> Iterator[None]:
    """Return a context in which waiting for a collective includes that its buffers are freed."""
    wait: Any = dist.Work.wait

    def wait_and_free(work: dist.Work, *arguments: Any, **options: Any) -> Any:
        result = wait(work, *arguments, **options)
        _wait_until_idle()
        return result

    with pytest.MonkeyPatch.context() as patch, _FreeingAtOnce():
        patch.setattr(dist.Work, "wait", wait_and_free)
        yield


class _FreeingAtOnce(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _WAIT:
            _wait_until_idle()
        return result


def _wait_until_idle() -> None:
    """Wait until each thread sleeps: it has no work, or its collective waits for other ranks."""
    idle, deadline = 0, time.monotonic() + _MOST_S
    while idle < _LOOKS:
        time.sleep(_PAUSE_S)
        states = _thread_states()
        idle = idle + 1 if all(state == "S" for state in states) else 0
        if time.monotonic() > deadline:
            raise TimeoutError(f"gloo's threads are still in states {states}")


def _thread_states() -> list[str]:
    """Return the states of gloo's threads in this process, such as R and S, see ``man proc``."""
    states = []
    for path in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # a thread that ended
            name, _, numbers = path.read_text().partition("(")[2].rpartition(")")
            states += [numbers.split()[0]] if name == "pt_gloo_runloop" else []
    if not states:
        raise RuntimeError("no thread of gloo has the name pt_gloo_runloop")
    return states
