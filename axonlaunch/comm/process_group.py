"""Some ranks of the world that communicate with each other, over a process group of torch.

Whatever takes a torch process group (DDP, fully_shard, device meshes) runs on ``torch_group``
unchanged; nothing here joins or leaves a world.
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
    """Note where the ranks of this process compute; threads of a mock world share one device."""
    global _computes_on  # as torch's default group is one of the process
    _computes_on = device


def computing_device() -> torch.device:
    """Return where the ranks of this process compute: the CPU, unless a world has said otherwise.

    Groups of gloo and of the mock world take tensors of both; their backend does not say.
    """
    return _computes_on


class ProcessGroup:
    """Some ranks of the world that communicate with each other.

    Attributes:
        ranks: The global ranks of the members, in the order of their rank in the group.
        size: How many they are.
        rank: This process's rank in the group, or -1 where it is not a member (as in torch).
    """

    def __init__(self, ranks: Iterable[int], torch_group: dist.ProcessGroup | None) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self._torch_group = torch_group
        self._is_closed = False
        self.rank = -1 if torch_group is None else torch_group.rank()

    @classmethod
    def from_torch(cls, group: dist.ProcessGroup) -> Self:
        """Wrap a process group made by torch, of a device mesh for instance."""
        return cls(dist.get_process_group_ranks(group), group)

    def contains(self, rank: int) -> bool:
        """Say whether a global rank is a member."""
        return rank in self.ranks

    @property
    def torch_group(self) -> dist.ProcessGroup:
        """The group as torch knows it.

        Raises:
            ValueError: This process is not a member, so it has no such group, or the world that
                the group belongs to is closed.
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
        """What carries this group's bytes.

        Raises:
            ValueError: It is a backend of torch's that is not supported, or this rank is no member.
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
        """Let go of torch's group: it holds the store, and rank 0's listening port with it."""
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
    """Make this rank's group where every rank of the world makes one, and no two groups share one.

    Only its members meet for it, so that a world of any size has its groups at once.

    Args:
        ranks: The members, this one among them.
        name: Of the axis along which they differ, for who looks at what a rank waits for.
        timeout_s: How long a collective of the group waits; None: as long as torch says.
        backend: torch's name of what carries the bytes; None: what the world has.
        options: The backend's.
    """
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    if options is not None and timeout is not None:
        limit_options(options, timeout)
    members = list(ranks)
    made = dist.new_group(
        members,
        timeout=timeout,
        backend=backend,
        pg_options=options,
        group_desc=f"mesh_{name}",  # as torch describes those of a device mesh
        use_local_synchronization=True,
    )
    return ProcessGroup(members, made)


def lone_group(rank: int, *, backend: str | None = None) -> ProcessGroup:
    """Return the group of this rank alone; torch's is made when somebody asks for it.

    Args:
        rank: This one.
        backend: As ``disjoint_group`` takes it.
    """
    return _LoneGroup(rank, backend)


class _LoneGroup(ProcessGroup):
    def __init__(self, rank: int, backend: str | None) -> None:
        super().__init__((rank,), None)
        self.rank = 0
        self._backend = backend

    @property
    def torch_group(self) -> dist.ProcessGroup:
        if self._torch_group is None and not self._is_closed:
            made = disjoint_group(self.ranks, name="alone", backend=self._backend)
            self._torch_group = made.torch_group
        return super().torch_group
