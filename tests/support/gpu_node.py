"""Simulates a node with eight GPUs and records which calls would initialize CUDA.

All processes of a command, however they are forked, see the same devices and write to the same
file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from support import served
from support.served import Server

DEVICES = 8
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, uuid="uuid", major=9, minor=0
)
ASKED = "a process forked to ask for the devices"
"""The only process that may initialize CUDA."""
_ASKING = ["devices_of_rank", "_outcome", "_fork", "map_forked"]
_INITIALIZE: dict[Any, dict[str, object]] = {
    torch.cuda: {
        "_lazy_init": None,
        "init": None,
        "set_device": None,
        "current_device": 0,
        "synchronize": None,
        "get_device_name": H100.name,
        "get_device_properties": H100,
        "get_device_capability": (9, 0),
        "mem_get_info": (H100.total_memory, H100.total_memory),
    },
    torch._C: {"_cuda_getDeviceCount": DEVICES},
    torch.accelerator: {"device_count": DEVICES, "current_stream": None},
}
"""Functions that initialize CUDA in their process, and their results in the simulation."""
_notes: Path | None = None
_initialized_in = 0


def become(notes: str) -> None:
    """Simulate the devices in this process and its forks; write the records to a file."""
    global _notes
    if _notes is None:
        os.register_at_fork(before=_before_fork)
    _notes = Path(notes)
    for module, functions in _INITIALIZE.items():
        for name, result in functions.items():
            setattr(module, name, _spy(f"{module.__name__}.{name}", result))
    torch.cuda.device_count = lambda: DEVICES
    ask = _spy("torch.cuda.is_available", True)
    # CUDA is not initialized if no device is visible. Traces therefore do not initialize it.
    is_available = lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != "" and ask()  # noqa: E731
    torch.cuda.is_available = torch.accelerator.is_available = is_available
    torch.cuda.is_initialized = lambda: _initialized_in == os.getpid()
    torch.cuda.nccl.version = lambda: (2, 27, 5)  # type: ignore[assignment]
    torch.accelerator.current_accelerator = lambda check_available=False: (
        None if check_available and not is_available() else torch.device("cuda")
    )
    dist.is_nccl_available = lambda: True


def _spy(name: str, result: object) -> Callable[..., Any]:
    def called(*args: object, **kwargs: object) -> object:
        global _initialized_in
        del args, kwargs
        frame: Any = sys._getframe(1)
        callers = []
        while frame is not None:
            callers.append(frame.f_code.co_name)
            frame = frame.f_back
        while callers and callers[0] != _ASKING[0] and _ASKING[0] in callers:
            del callers[0]
        asks = callers[: len(_ASKING)] == _ASKING
        _note(f"{name} in {ASKED if asks else ' < '.join(callers[:8])}")
        if _initialized_in not in (0, os.getpid()):
            _note(f"{name} in a fork of a process that initialized CUDA")
        _initialized_in = os.getpid()
        return result

    return called


def _before_fork() -> None:
    if _initialized_in == os.getpid():
        _note("a process that initialized CUDA forks")


def _note(text: str) -> None:
    assert _notes is not None
    with _notes.open("a") as stream:  # written in one call, because several processes append
        stream.write(f"{text}\n")


def here(notes: str, function: Callable[..., None], *args: Any) -> None:
    """Run a function on the simulated node."""
    become(notes)
    function(*args)


def command(server: Server, notes: str, *overrides: str) -> None:
    """Run the ``axonlaunch`` command on the simulated node."""
    become(notes)
    served.command(server, *overrides, around=partial(here, notes))
