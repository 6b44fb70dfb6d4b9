"""The world of ranks, from where one of them stands, over ``torch.distributed``'s default group.

It chooses the backend and the device; nothing here starts a process.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

from axonlaunch.comm import nccl
from axonlaunch.comm.backend import Backend
from axonlaunch.comm.errors import NcclError
from axonlaunch.comm.gloo import proven_groups
from axonlaunch.comm.mesh import Mesh
from axonlaunch.comm.mismatch_check import check_collective
from axonlaunch.comm.process_group import ProcessGroup, compute_on, default_group
from axonlaunch.comm.rendezvous import RankEnvironment, find_place, gloo_towards, open_store
from axonlaunch.comm.torch_internals import name_groups_by_members
from axonlaunch.system import gpus

if TYPE_CHECKING:
    from axonlaunch.comm.mock import MockWorld


class World:
    """All ranks of a run, from where one of them stands.

    It stands on the default process group of ``torch.distributed``, which has been made before;
    ``init`` and ``mock`` make both. Use it in a ``with`` statement, or ``close`` it.

    Attributes:
        rank: This process among all.
        local_rank: This process among those of its node.
        world_size: The number of processes.
        device: Where this rank computes.
        backend: What carries the bytes.
        is_main: Whether this is rank 0.
        default_group: The group of all ranks.
        store: Where the ranks met, for small messages; None where who made the world keeps it.
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
        store: dist.Store | None = None,
    ) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.device = device
        self.backend = backend
        self.is_main = rank == 0
        self.timeout_s = timeout_s
        compute_on(device)
        name_groups_by_members()
        self.default_group = default_group()
        self.store = store
        self._groups = [self.default_group]
        self._at_close = contextlib.ExitStack()

    @classmethod
    def init(
        cls,
        *,
        backend: Backend | str = "auto",
        device: str = "auto",
        timeout_s: float = 600.0,
        store: dist.Store | None = None,
    ) -> Self:
        """Join the world that the environment describes, or make a world of one.

        Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun and SLURM
        wrappers set them, and LOCAL_WORLD_SIZE where it is set. Rank 0 listens on MASTER_ADDR and
        gloo on the interface that leads there; with one on loopback nothing listens to the network.

        Args:
            backend: ``gloo``, ``nccl``, or ``auto``: nccl where torch's accelerator is CUDA and
                every rank of this node has a device of its own, else gloo.
            device: ``cpu``; ``cuda``: on gloo ranks share this node's GPUs, and only reductions and
                broadcasts of their tensors work; ``auto``: what the backend works on.
            timeout_s: How long a rank waits for the others, in seconds.
            store: Where the ranks meet, instead of MASTER_ADDR and MASTER_PORT.

        Raises:
            ValueError: The environment is half set or invalid, the backend can't be had here,
                or there is a world already.
            NcclError: It is a ValueError that is about NCCL.
        """
        place = find_place(os.environ, store=store)
        return cls.join(place, backend=backend, device=device, timeout_s=timeout_s, store=store)

    @classmethod
    def join(
        cls,
        place: RankEnvironment,
        *,
        backend: Backend | str = "auto",
        device: str = "auto",
        timeout_s: float = 600.0,
        store: dist.Store | None = None,
        connects_at_once: bool = True,
    ) -> Self:
        """Join a world as a given rank, whatever the environment says; else it is ``init``.

        Args:
            place: Which rank this is, and where the others are.
            backend: As for ``init``.
            device: As for ``init``.
            timeout_s: As for ``init``.
            store: Where the ranks meet; None: at the address of ``place``.
            connects_at_once: Whether NCCL connects all ranks before the first collective, and later
                groups are split from that. Single messages then are collectives of their group, one
                after another; without it each pair of ranks connects apart, on its first message.

        Raises:
            ValueError: The backend can't be had here, or there is a world already.
            NcclError: It is a ValueError that is about NCCL.
        """
        if dist.is_initialized():
            raise ValueError(
                "this process has a world (or a torch default group) already: close() it, or "
                "call dist.destroy_process_group(), before World.init()"
            )
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: a time limit is more than 0 seconds")
        if device == "cpu" and backend == "auto":
            backend = Backend.GLOO
        chosen = choose_backend(str(backend), place)
        computes_on = _device(chosen, place.local_rank, asked=device)
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
                device_id=computes_on if chosen is Backend.NCCL and connects_at_once else None,
            )
            world = cls(
                rank=place.rank,
                local_rank=place.local_rank,
                world_size=place.world_size,
                device=computes_on,
                backend=chosen,
                timeout_s=timeout_s,
                store=store,
            )
            world._at_close = at_close.pop_all()
        return world

    @classmethod
    def mock(
        cls, world_size: int, *, timeout_s: float = 60.0, device: torch.device | str = "cpu"
    ) -> MockWorld[Self]:
        """Describe a world of rank threads in this process; its ``run`` starts them.

        Args:
            world_size: The number of ranks.
            timeout_s: How long a rank may compute without communicating.
            device: ``cpu``, or ``cuda`` for one GPU that all ranks share.

        Raises:
            ValueError: There is no rank, or no time, or no such device.
        """
        from axonlaunch.comm.mock import MockWorld  # most worlds have no use for it

        return MockWorld(world_size, join=cls, timeout_s=timeout_s, device=device)

    def new_group(self, ranks: Iterable[int]) -> ProcessGroup:
        """Make a group of some ranks; every rank of the world calls this, members or not.

        Raises:
            ValueError: No rank, a rank twice, or a rank that the world does not have.
            MismatchError: Ranks name different members (not reported on NCCL).
        """
        members = sorted(ranks)
        problem = None
        if not members:
            problem = "a group has at least one rank"
        elif members[0] < 0 or members[-1] >= self.world_size:
            problem = f"the world has ranks 0 to {self.world_size - 1}"
        elif len(set(members)) < len(members):
            problem = "a rank can be in a group once"
        check_collective(
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
        return self.lay_out(sizes)

    def lay_out(
        self,
        sizes: Mapping[str, int],
        *,
        keep: tuple[str, ...] = (),
        urgent: tuple[str, ...] = (),
        with_host: tuple[str, ...] | None = None,
    ) -> Mesh:
        """Do as ``mesh``, with more to say of some axes.

        Args:
            sizes: Ranks along each axis, outermost first.
            keep: Axes that stay in torch's mesh even where they have one rank.
            urgent: Axes whose collectives a GPU is to prefer to whatever else it has to do.
            with_host: Axes whose groups are to carry the host's tensors too, on NCCL as well; None:
                all of them.
        """
        # Threads that take turns don't wait: the mock world finds by itself that all are stuck.
        waits_s = None if self.backend is Backend.MOCK else self.timeout_s
        on_nccl = self.backend is Backend.NCCL
        return Mesh(
            sizes,
            rank=self.rank,
            device_type=self.device.type,
            keep=keep,
            urgent=urgent if on_nccl else (),
            with_host=with_host if on_nccl else None,
            timeout_s=waits_s,
        )

    def close(self) -> None:
        """Leave the world: destroy its groups. A second call does nothing."""
        with self._at_close:
            groups, self._groups = self._groups, []
            if groups and dist.is_initialized() and groups[0].torch_group is dist.group.WORLD:
                dist.destroy_process_group()
            for group in groups:
                group.close()
            self.store = None  # and rank 0's listening port with it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Destroying NCCL's communicators waits for the peers, who may wait for this rank: the error
        # would be known when the time limit ends them all. Its process is about to end.
        if kind is None or self.backend is not Backend.NCCL:
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


def choose_backend(name: str, place: RankEnvironment) -> Backend:
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


def _every_local_rank_has_a_device(place: RankEnvironment) -> bool:
    """Decide from what all ranks of a node see alike, so that they decide alike."""
    devices = gpus.device_count()
    if devices == 1 and not place.on_loopback:
        return True  # a scheduler has given each of its tasks one
    needed = place.local_world_size
    if needed is None:
        needed = place.world_size if place.on_loopback else place.local_rank + 1
    return devices > 0 and devices >= needed


def _device(backend: Backend, local_rank: int, *, asked: str = "auto") -> torch.device:
    """Return where a rank computes, and make it the current device.

    A rank that sees one device has been given it: by ``--gpus-per-task=1``, or by what sets
    CUDA_VISIBLE_DEVICES for each rank.
    """
    if asked not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={asked}: there is no such device; use auto, cpu or cuda")
    if backend is not Backend.NCCL:
        return _shared_device(local_rank) if asked == "cuda" else torch.device("cpu")
    if asked == "cpu":
        raise NcclError("backend=nccl, device=cpu: NCCL works on GPUs alone; use backend=gloo")
    devices = gpus.device_count()
    if not devices:
        raise NcclError(f"backend=nccl: {nccl.status().reason}")
    index = 0 if devices == 1 else local_rank
    if index >= devices:
        raise NcclError(
            f"backend=nccl: LOCAL_RANK={local_rank} has no device, this process sees {devices}; "
            "start fewer ranks on this node, or use backend=gloo"
        )
    return _become_current(index)


def _shared_device(local_rank: int) -> torch.device:
    """Return the GPU of a rank on gloo: those of a node are dealt out, and shared if need be."""
    devices = torch.accelerator.device_count()
    if not devices:
        raise ValueError("device=cuda: torch sees no GPU here; use device=cpu")
    return _become_current(local_rank % devices)


def _become_current(index: int) -> torch.device:
    """Make a device this process's, and initialise CUDA there.

    For a process in which it is not, torch's device mesh would choose the device of its local rank,
    which may not be visible.
    """
    torch.accelerator.set_device_index(index)
    torch.cuda.init()
    return torch.device("cuda", index)
