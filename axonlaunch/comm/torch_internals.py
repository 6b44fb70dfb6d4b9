"""Private names of torch.distributed that this package and the packages above it use.

``tests/house/test_private_names.py`` tests each name. When torch moves one, the test names it, and
only this file has to change. (For the mock world, see ``mock/torch_internals.py``.)
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
_group_counts: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""Number of groups created for each list of members, per default group."""

# torch 2.11 has only the old names, and 2.13 warns about them.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def chunk_cat(tensors: Sequence[Tensor], *, chunks: int, out: Tensor) -> None:
    """Cut each tensor along its first dimension into chunks; row i of ``out`` gets all chunks i.

    Args:
        tensors: Tensors of one dtype with at least one dimension.
        chunks: Number of chunks, which is the number of rows of ``out``.
        out: Tensor of shape [chunks, elements in one chunk of every tensor].
    """
    torch._chunk_cat(list(tensors), dim=0, num_chunks=chunks, out=out)


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group with a name that functional collectives use."""
    group: dist.ProcessGroup = _c10d._resolve_process_group(name)
    return group


def name_groups_by_members() -> None:
    """Name groups that only their members create by these members; may be called repeatedly.

    torch's name is a hash of the members and of the number of groups that this process is in. This
    number differs between members if some of them are in another group, and then each member waits
    for the others under a different name. Example: after ``new_group([2])``, ranks 2 and 3 named
    their group on an axis of a mesh differently.
    """
    _c10d._hash_ranks_to_str = _name_by_members


def _name_by_members(ranks: Sequence[int]) -> str:
    """Return a name for the next group of these ranks that is the same on each of them."""
    counts = _group_counts.setdefault(_c10d._get_default_group(), Counter())
    members = tuple(ranks)
    counts[members] += 1
    text = f"{members} {counts[members]}"
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def ranks_of_groups() -> dict[str, tuple[int, ...]]:
    """Return the global ranks of every group of this process, by group name."""
    names, ranks = dict(_c10d._world.pg_names), dict(_c10d._world.pg_group_ranks)
    return {str(name): tuple(ranks[group]) for group, name in names.items() if group in ranks}


def flight_recorders(*, as_json: bool) -> list[Callable[..., Any]]:
    """Return functions that dump recorded collectives, pickled or as JSON.

    A torch build with NCCL has a second recorder, only for NCCL.
    """
    names = [f"_dump_{kind}_trace{'_json' * as_json}" for kind in ("fr", "nccl")]
    cpp: Any = torch._C._distributed_c10d
    return [getattr(cpp, name) for name in names if hasattr(cpp, name)]


def gloo_options(devices: list[Any], *, threads: int, timeout: timedelta) -> Any:
    """Return options of a gloo group with its listening devices and its timeout."""
    gloo: Any = dist.ProcessGroupGloo  # torch's stub leaves it out
    options = gloo._Options()
    options._devices, options._threads, options._timeout = devices, threads, timeout
    return options


def limit_options(options: Any, timeout: timedelta) -> None:
    """Set the timeout of a backend's options; torch warns if it differs from the group's."""
    options._timeout = timeout


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout for later operations of a gloo group."""
    group._set_default_timeout(timeout)
