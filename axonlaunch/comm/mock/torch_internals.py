"""The private names of torch that the mock world stands on: all of them, and nothing else.

``tests/comm/test_mock_internals.py`` pins each name. When torch moves one, it says which, and
the fix belongs in this file alone.
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
    """What ``torch.distributed`` knows of its groups, separately for each thread.

    Stands in for ``torch.distributed.distributed_c10d._World`` with the same attributes. (torch
    has such a class for its own tests; in 2.11 it lacks ``comms``.)
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
    """Say whether each thread has its own table of process groups.

    torch can set this mode but not report it: register a group here, look for it from elsewhere.
    """
    group = _cpp.ProcessGroup(0, 1)  # torch's table holds it weakly
    _cpp._register_process_group(_PROBE, group)
    seen: list[bool] = []

    def look() -> None:
        try:
            _cpp._resolve_process_group(_PROBE)
        except RuntimeError:
            seen.append(False)
        else:
            seen.append(True)

    thread = threading.Thread(target=look, name="axonlaunch-isolation-probe")
    thread.start()
    thread.join()
    _cpp._unregister_process_group(_PROBE)
    return not seen[0]


def outlive_cuda_guard() -> None:
    """Make torch set up its stand-in for a missing CUDA device in this thread.

    A CUDA build of torch that sees no device makes it when the first FakeTensorMode is entered
    (DTensor enters one), and loses it with the thread that did: later ones crash the process.
    So the thread that runs a world, which outlives the rank threads, makes it first.
    """
    if not torch.cuda.is_available():
        _torch._ensureCUDADeviceGuardSet()


def forget_meshes_of_thread() -> None:
    """Empty what torch remembers of device meshes for this thread, and keeps when it ends."""
    _torch._clear_DTensor_sharding_propagator_cache()


@functools.cache
def _caches(module: ModuleType, _members: int) -> list[functools._lru_cache_wrapper[Any]]:
    """Return the cached functions of a module and its classes, for as long as it has no more."""
    kinds = [member for member in vars(module).values() if isinstance(member, type)]
    members = [member for holder in (module, *kinds) for member in [*vars(holder).values()]]
    functions = [getattr(member, "__func__", member) for member in members]
    return [one for one in functions if isinstance(one, functools._lru_cache_wrapper)]


def forget_meshes() -> None:
    """Empty what torch remembers of device meshes for the whole process.

    A mesh distinguishes threads by their identifiers, which the system gives out again: a mesh of
    a later run would be taken for one of an earlier run, whose groups are gone.
    """
    for name, module in sys.modules.copy().items():
        if name.startswith("torch.distributed.tensor"):
            for cache in _caches(module, len(vars(module))):
                cache.cache_clear()
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    clear_planners = getattr(redistribute, "clear_redistribute_planner_cache", None)
    if clear_planners is not None:  # torch 2.12 and later
        clear_planners()


@contextlib.contextmanager
def isolated_threads() -> Iterator[None]:
    """Give each thread started inside its own ``torch.distributed``; put all back at the end.

    What is put back: the default group and all that torch registers beside it, the isolation
    mode, the rank that torch's C++ log lines carry, ``sys.excepthook``, which
    ``init_process_group`` replaces, and the replica whose forward runs: each of several that take
    turns leaves the one before, and the last of them, with its whole model, would stay.
    """
    outlive_cuda_guard()
    replica = _DDP._active_ddp_module
    world, hook, isolated = _python._world, sys.excepthook, threads_are_isolated()
    _python._world = WorldOfThread()
    _cpp._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        forget_meshes()
        _cpp._set_thread_isolation_mode(isolated)
        _python._world = world
        _python._update_default_pg(world.default_pg)
        _DDP._active_ddp_module = replica
        sys.excepthook = hook
