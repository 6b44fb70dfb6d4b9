"""The private names of torch.distributed that this room and those above it stand on.

``tests/house/test_private_names.py`` pins each: when torch moves one, it says which, and the fix
belongs in this file alone. (Those of the mock world are in ``mock/torch_internals.py``.)
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor

__all__ = [
    "AsyncCollectiveTensor",
    "all_gather_single",
    "chunk_cat",
    "flight_recorders",
    "gloo_options",
    "group_by_name",
    "limit_options",
    "name_groups_by_members",
    "ranks_of_groups",
    "reduce_scatter_single",
    "set_timeout",
]

_c10d: Any = distributed_c10d
_named: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""The groups named by their members, counted for each default group."""

# torch 2.11 has only the old names, and 2.13 warns of them.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def chunk_cat(tensors: Sequence[Tensor], *, chunks: int, out: Tensor) -> None:
    """Cut each tensor along its first dim into chunks and put those of one place in one row.

    Args:
        tensors: Of one dtype, each with a first dim.
        chunks: Rows of ``out``.
        out: Of shape [chunks, elements of a chunk of every tensor].
    """
    torch._chunk_cat(list(tensors), dim=0, num_chunks=chunks, out=out)


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the group that functional collectives name so."""
    group: dist.ProcessGroup = _c10d._resolve_process_group(name)
    return group


def name_groups_by_members() -> None:
    """Name each group that only its members create by those members; a second call does nothing.

    torch's name is a hash of the members and of the number of groups that this process is in. The
    number differs between members if some of them are in another group, and then each member waits
    for the others under a name of its own. Example: after ``new_group([2])`` ranks 2 and 3 named
    their group on an axis of a mesh differently.
    """
    _c10d._hash_ranks_to_str = _name_by_members


def _name_by_members(ranks: Sequence[int]) -> str:
    """Return a name for the next group of these ranks, the same on each of them."""
    counts = _named.setdefault(_c10d._get_default_group(), Counter())
    members = tuple(ranks)
    counts[members] += 1
    text = f"{members} {counts[members]}"
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def ranks_of_groups() -> dict[str, tuple[int, ...]]:
    """Return the ranks of every group of this process, by the name of the group."""
    names, ranks = dict(_c10d._world.pg_names), dict(_c10d._world.pg_group_ranks)
    return {str(name): tuple(ranks[group]) for group, name in names.items() if group in ranks}


def flight_recorders(*, as_json: bool) -> list[Callable[..., Any]]:
    """Return what gives the recorded collectives, pickled or as JSON.

    A build of torch with NCCL has a second recorder, of NCCL alone.
    """
    names = [f"_dump_{kind}_trace{'_json' * as_json}" for kind in ("fr", "nccl")]
    cpp: Any = torch._C._distributed_c10d
    return [getattr(cpp, name) for name in names if hasattr(cpp, name)]


def gloo_options(devices: list[Any], *, threads: int, timeout: timedelta) -> Any:
    """Return options of a gloo group: where it listens, and how long its ranks wait."""
    gloo: Any = dist.ProcessGroupGloo  # torch's stub leaves it out
    options = gloo._Options()
    options._devices, options._threads, options._timeout = devices, threads, timeout
    return options


def limit_options(options: Any, timeout: timedelta) -> None:
    """Let a backend's options have the group's timeout; torch warns where the two differ."""
    options._timeout = timeout


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Let a gloo group's operations wait that long from now on."""
    group._set_default_timeout(timeout)
