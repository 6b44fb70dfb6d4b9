"""The world of ranks and the groups within it, over ``torch.distributed``'s default group.

Whatever takes a torch process group (DDP, fully_shard, device meshes) runs on ``torch_group``
unchanged; nothing here starts a process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

from axonlaunch.comm import nccl
from axonlaunch.comm.agreement import agree
from axonlaunch.comm.backend import Backend
from axonlaunch.comm.gloo import proven_groups
from axonlaunch.comm.rendezvous import Place, find_place, gloo_towards, open_store

if TYPE_CHECKING:
    from axonlaunch.comm.mesh import Mesh
    from axonlaunch.comm.mock import MockWorld


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
        """What carries this group's bytes."""
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


class World:
    """All ranks of a run, from where one of them stands.

    It stands on the default process group of ``torch.distributed``, which has been made before;
    ``init`` and ``mock`` make both. Use it in a ``with`` statement, or ``close`` it.

    Attributes:
        rank: This process among all.
        local_rank: This process among those of its machine.
        world_size: The number of processes.
        device: Where this rank computes.
        backend: What carries the bytes.
        is_main: Whether this is rank 0.
        default_group: The group of all ranks.
    """

    def __init__(
        self,
        *,
        rank: int,
        local_rank: int,
        world_size: int,
        device: torch.device,
        backend: Backend,
        timeout_s: float = 600.0,
    ) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.device = device
        self.backend = backend
        self.is_main = rank == 0
        self.timeout_s = timeout_s
        self.default_group = default_group()
        self._groups = [self.default_group]
        self._at_close = contextlib.ExitStack()

    @classmethod
    def init(
        cls,
        *,
        backend: Backend | str = "auto",
        timeout_s: float = 600.0,
        store: dist.Store | None = None,
    ) -> Self:
        """Join the world that the environment describes, or make a world of one.

        Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun and SLURM
        wrappers set them, and LOCAL_WORLD_SIZE where it is set. Rank 0 listens on MASTER_ADDR and
        gloo on the interface that leads there; with one on loopback nothing listens to the network.

        Args:
            backend: ``gloo``, ``nccl``, or ``auto``: nccl where torch's accelerator is CUDA and
                every rank of this machine has a device of its own, else gloo.
            timeout_s: How long a rank waits for the others, in seconds.
            store: Where the ranks meet, instead of MASTER_ADDR and MASTER_PORT.

        Raises:
            ValueError: The environment is half set or senseless, the backend can't be had here,
                or there is a world already.
        """
        if dist.is_initialized():
            raise ValueError(
                "this process has a world (or a torch default group) already: close() it, or "
                "call dist.destroy_process_group(), before World.init()"
            )
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: a time limit is more than 0 seconds")
        place = find_place(os.environ, store=store)
        chosen = choose_backend(str(backend), place)
        device = _device(chosen, place.local_rank)
        timeout = timedelta(seconds=timeout_s)
        with contextlib.ExitStack() as at_close:
            at_close.enter_context(gloo_towards(place.master_addr or "localhost"))
            at_close.callback(setattr, sys, "excepthook", sys.excepthook)
            store = store or open_store(place, timeout=timeout)
            at_close.callback(_let_go_of, store)
            at_close.enter_context(proven_groups(store, rank=place.rank))
            dist.init_process_group(
                chosen.torch_name,
                store=store,
                rank=place.rank,
                world_size=place.world_size,
                timeout=timeout,
                device_id=device if chosen is Backend.NCCL else None,
            )
            world = cls(
                rank=place.rank,
                local_rank=place.local_rank,
                world_size=place.world_size,
                device=device,
                backend=chosen,
                timeout_s=timeout_s,
            )
            world._at_close = at_close.pop_all()
        return world

    @staticmethod
    def mock(world_size: int, *, timeout_s: float = 60.0) -> MockWorld:
        """Describe a world of rank threads in this process; its ``run`` starts them."""
        from axonlaunch.comm.mock import MockWorld

        return MockWorld(world_size, timeout_s=timeout_s)

    def new_group(self, ranks: Iterable[int]) -> ProcessGroup:
        """Make a group of some ranks; every rank of the world calls this, members or not.

        Raises:
            ValueError: No rank, a rank twice, or a rank that the world does not have.
            MismatchError: Ranks name different members (not told on NCCL).
        """
        members = sorted(ranks)
        problem = None
        if not members:
            problem = "a group has at least one rank"
        elif members[0] < 0 or members[-1] >= self.world_size:
            problem = f"the world has ranks 0 to {self.world_size - 1}"
        elif len(set(members)) < len(members):
            problem = "a rank can be in a group once"
        agree(
            self.default_group,
            f"new_group of ranks {members}",
            problem=ValueError(f"new_group of ranks {members}: {problem}") if problem else None,
        )
        made = dist.new_group(members, timeout=timedelta(seconds=self.timeout_s))
        group = ProcessGroup(members, made if self.rank in members else None)
        self._groups.append(group)
        return group

    def mesh(self, **sizes: int) -> Mesh:
        """Lay the world's ranks out on named axes, ``mesh(pp=2, dp_shard=2, tp=2)``.

        The last axis counts fastest, so its ranks are neighbours. Every rank calls this.

        Raises:
            ValueError: The sizes don't multiply to the world.
        """
        from axonlaunch.comm.mesh import Mesh

        return Mesh(self, sizes)

    def close(self) -> None:
        """Leave the world: destroy its groups. A second call does nothing."""
        with self._at_close:
            groups, self._groups = self._groups, []
            if groups and dist.is_initialized() and groups[0].torch_group is dist.group.WORLD:
                dist.destroy_process_group()
            for group in groups:
                group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"World(rank={self.rank}, local_rank={self.local_rank}, "
            f"world_size={self.world_size}, device={str(self.device)!r}, "
            f"backend={self.backend.value!r})"
        )


def _let_go_of(store: dist.Store) -> None:
    """Hold a store for as long as this is to be called: torch holds only its C++ part."""
    del store


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


def choose_backend(name: str, place: Place) -> Backend:
    """Turn what the user said into a backend that processes can use.

    Raises:
        ValueError: There is none of that name, or its ranks are no processes.
    """
    if name == "auto":
        return Backend.NCCL if _every_local_rank_has_a_device(place) else Backend.GLOO
    if name == Backend.MOCK:
        raise ValueError(
            "backend=mock: its ranks are threads that only World.mock(world_size).run(fn) starts"
        )
    if name not in [known.value for known in Backend]:
        raise ValueError(f"backend={name}: there is no such backend; use auto, gloo or nccl")
    return Backend(name)


def _every_local_rank_has_a_device(place: Place) -> bool:
    """Decide from what all ranks of a machine see alike, so that they decide alike."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "cuda" or not nccl.status().available:
        return False
    ranks_here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if ranks_here.isdigit():
        needed = int(ranks_here)
    else:
        needed = place.world_size if place.on_loopback else place.local_rank + 1
    return torch.accelerator.device_count() >= needed


def _device(backend: Backend, local_rank: int) -> torch.device:
    """Return where a rank computes, and make it the current device."""
    if backend is not Backend.NCCL:
        return torch.device("cpu")
    found = nccl.status()
    if not found.available:
        raise ValueError(f"backend=nccl: {found.reason}")
    if local_rank >= len(found.devices):
        raise ValueError(
            f"backend=nccl: LOCAL_RANK={local_rank} has no device, this process sees "
            f"{len(found.devices)}; start fewer ranks on this machine, or use backend=gloo"
        )
    torch.accelerator.set_device_index(local_rank)
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, local_rank)
