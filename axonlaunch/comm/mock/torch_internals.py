"""All private names of torch that the mock world uses.

``tests/comm/test_mock_internals.py`` tests each name. When torch moves one, the test names it, and
only this file has to change.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch.distributed import distributed_c10d

_python: Any = distributed_c10d
_torch: Any = torch._C
_DDP: Any = torch.nn.parallel.DistributedDataParallel
_cpp: Any = torch._C._distributed_c10d
_PROBE = "axonlaunch-isolation-probe"


class WorldOfThread(threading.local):
    """``torch.distributed``'s record of process groups, separate for each thread.

    It replaces ``torch.distributed.distributed_c10d._World`` and has the same attributes. (torch
    has such a class for its own tests, but in 2.11 it lacks ``comms``.)
    """

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.group_count = 0
        self.comms: list[Any] = []
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, Any] = {}
        self.pg_group_ranks: dict[Any, Any] = {}
        self.pg_backend_config: dict[Any, Any] = {}
        self.pg_to_tag: dict[Any, Any] = {}
        self.tags_to_pg: dict[Any, Any] = {}
        self.pg_coalesce_state: dict[Any, Any] = {}


def threads_are_isolated() -> bool:
    """Return whether each thread has a separate table of process groups.

    torch can set this mode but not report it. So this registers a group here and looks for it from
    another thread.
    """
    group = _cpp.ProcessGroup(0, 1)  # torch's table holds it weakly
    _cpp._register_process_group(_PROBE, group)
    found: list[bool] = []

    def look() -> None:
        try:
            _cpp._resolve_process_group(_PROBE)
        except RuntimeError:
            found.append(False)
        else:
            found.append(True)

    thread = threading.Thread(target=look, name="axonlaunch-isolation-probe")
    thread.start()
    thread.join()
    _cpp._unregister_process_group(_PROBE)
    return not found[0]


def outlive_cuda_guard() -> None:
    """Make torch create its replacement for a missing CUDA device in this thread.

    A CUDA build of torch without a device creates it when a thread first enters FakeTensorMode
    (DTensor does), and loses it when that thread ends. Later uses crash the process. So the thread
    that runs a world creates it first, because it outlives the rank threads.
    """
    if not torch.cuda.is_available():
        _torch._ensureCUDADeviceGuardSet()


def forget_meshes_of_thread() -> None:
    """Clear this thread's cache of device meshes, which torch keeps after the thread ends."""
    _torch._clear_DTensor_sharding_propagator_cache()


@functools.cache
def _caches(module: ModuleType, _members: int) -> list[functools._lru_cache_wrapper[Any]]:
    """Return the cached functions of a module and its classes; cached until the module grows."""
    kinds = [member for member in vars(module).values() if isinstance(member, type)]
    members = [member for holder in (module, *kinds) for member in [*vars(holder).values()]]
    functions = [getattr(member, "__func__", member) for member in members]
    return [
        function for function in functions if isinstance(function, functools._lru_cache_wrapper)
    ]


def forget_meshes() -> None:
    """Clear torch's process-wide caches of device meshes.

    A mesh distinguishes threads by their identifiers, which the system reuses. A mesh of a later
    run would be mistaken for a mesh of an earlier run, whose groups no longer exist.
    """
    for name, module in sys.modules.copy().items():
        if name.startswith("torch.distributed.tensor"):
            for cache in _caches(module, len(vars(module))):
                cache.cache_clear()
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    clear_planners = getattr(redistribute, "clear_redistribute_planner_cache", None)
    if clear_planners is not None:  # exists since torch 2.12
        clear_planners()


@contextlib.contextmanager
def isolated_threads() -> Iterator[None]:
    """Give each thread that starts in this context a separate ``torch.distributed`` state.

    Restored at the end are: the default group and other groups in torch's record, the isolation
    mode, the rank in torch's C++ log lines, ``sys.excepthook`` (which ``init_process_group``
    replaces), and DDP's active module. With several ranks taking turns, the last rank's active
    module would stay referenced with its whole model.
    """
    outlive_cuda_guard()
    active_module = _DDP._active_ddp_module
    world, excepthook, isolated = _python._world, sys.excepthook, threads_are_isolated()
    _python._world = WorldOfThread()
    _cpp._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        forget_meshes()
        _cpp._set_thread_isolation_mode(isolated)
        _python._world = world
        _python._update_default_pg(world.default_pg)
        _DDP._active_ddp_module = active_module
        sys.excepthook = excepthook
