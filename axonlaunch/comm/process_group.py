"""Groups of ranks that communicate with each other through a torch process group.

APIs that accept a torch process group (DDP, fully_shard, device meshes) work with ``torch_group``.
Worlds are created and closed elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from axonlaunch.comm.backend import Backend
from axonlaunch.comm.torch_internals import limit_options

_computes_on = torch.device("cpu")


def compute_on(device: torch.device) -> None:
    """Set the device of this process's ranks; all ranks of a mock world share one device."""
    global _computes_on  # one for the process, like torch's default group
    _computes_on = device


def computing_device() -> torch.device:
    """Return the device on which this process's ranks compute; the CPU unless a world has set it.

    Groups of gloo and of the mock world accept tensors on the CPU and on GPUs, so their backend
    does not determine the device.
    """
    return _computes_on


class ProcessGroup:
    """Some ranks of the world that communicate with each other.

    Attributes:
        ranks: Global ranks of the members, ordered by their rank in the group.
        size: Number of members.
        rank: This process's rank in the group, or -1 if it is not a member (as in torch).
    """

    def __init__(self, ranks: Iterable[int], torch_group: dist.ProcessGroup | None) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self._torch_group = torch_group
        self._is_closed = False
        self.rank = -1 if torch_group is None else torch_group.rank()

    @classmethod
    def from_torch(cls, group: dist.ProcessGroup) -> Self:
        """Wrap a process group that torch created, for example that of a device mesh."""
        return cls(dist.get_process_group_ranks(group), group)

    def contains(self, rank: int) -> bool:
        """Return whether a global rank is a member."""
        return rank in self.ranks

    @property
    def torch_group(self) -> dist.ProcessGroup:
        """The torch process group.

        Raises:
            ValueError: This process is not a member, or the world of the group is closed.
        """
        if self._is_closed:
            raise ValueError(f"the world of the group {list(self.ranks)} is closed")
        if self._torch_group is None:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the group {list(self.ranks)}: only members "
                "may communicate in it; ask group.contains(world.rank) first"
            )
        return self._torch_group

    @functools.cached_property
    def backend(self) -> Backend:
        """Communication backend of this group.

        Raises:
            ValueError: The torch backend is not supported, or this rank is not a member.
        """
        name = str(dist.get_backend(self.torch_group))
        try:
            return Backend.of_torch(name)
        except ValueError:
            raise ValueError(
                f"the group {list(self.ranks)} has the torch backend {name!r}; expected one of "
                f"{', '.join(Backend)}: pass it to init_process_group"
            ) from None

    def close(self) -> None:
        """Release torch's group, which holds the store and therefore rank 0's listening port."""
        self._torch_group, self._is_closed = None, True

    def __repr__(self) -> str:
        return f"ProcessGroup(ranks={list(self.ranks)}, rank={self.rank})"


def default_group() -> ProcessGroup:
    """Return the group of all ranks.

    Raises:
        ValueError: There is no world.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        raise ValueError(
            "there is no world: call World.init() first (without a launcher's environment it is "
            "a world of one)"
        )
    return ProcessGroup.from_torch(group)


def disjoint_group(
    ranks: Iterable[int],
    *,
    name: str,
    timeout_s: float | None = None,
    backend: str | None = None,
    options: Any = None,
) -> ProcessGroup:
    """Create this rank's group, if every rank of the world creates one and no two groups overlap.

    Only the members of a group synchronize, so a large world creates all its groups at once.

    Args:
        ranks: Members of the group, including this rank.
        name: Name of the axis along which the members differ, for diagnostics.
        timeout_s: Timeout in seconds of the group's collectives; None for torch's default.
        backend: torch's backend name; None for the world's backend.
        options: Options of the backend.
    """
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    if options is not None and timeout is not None:
        limit_options(options, timeout)
    members = list(ranks)
    torch_group = dist.new_group(
        members,
        timeout=timeout,
        backend=backend,
        pg_options=options,
        group_desc=f"mesh_{name}",  # torch's description of a device mesh's group
        use_local_synchronization=True,
    )
    return ProcessGroup(members, torch_group)


def single_rank_group(rank: int, *, backend: str | None = None) -> ProcessGroup:
    """Return the group that contains only this rank; torch's group is created at its first use.

    Args:
        backend: See ``disjoint_group``.
    """
    return _SingleRankGroup(rank, backend)


class _SingleRankGroup(ProcessGroup):
    def __init__(self, rank: int, backend: str | None) -> None:
        super().__init__((rank,), None)
        self.rank = 0
        self._backend = backend

    @property
    def torch_group(self) -> dist.ProcessGroup:
        if self._torch_group is None and not self._is_closed:
            group = disjoint_group(self.ranks, name="alone", backend=self._backend)
            self._torch_group = group.torch_group
        return super().torch_group
