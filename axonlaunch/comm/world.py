"""The world of ranks from one rank's view, on ``torch.distributed``'s default group.

This module selects the backend and the device. It starts no processes.
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

from axonlaunch.comm.backend import Backend
from axonlaunch.comm.checks.mismatch_check import check_collective
from axonlaunch.comm.connection import nccl
from axonlaunch.comm.connection.gloo import authenticated_groups
from axonlaunch.comm.connection.rendezvous import (
    RankEnvironment,
    find_place,
    gloo_towards,
    open_store,
)
from axonlaunch.comm.errors import NcclError
from axonlaunch.comm.mesh import Mesh
from axonlaunch.comm.process_group import ProcessGroup, compute_on, default_group
from axonlaunch.comm.torch_internals import name_groups_by_members
from axonlaunch.system import gpus

if TYPE_CHECKING:
    from axonlaunch.comm.mock import MockWorld


class World:
    """All ranks of a run, from the view of one rank.

    It uses the default process group of ``torch.distributed``, which must exist already; ``init``
    and ``mock`` create both. Use it in a ``with`` statement, or call ``close``.

    Attributes:
        rank: Global rank of this process.
        local_rank: Rank of this process on its node.
        world_size: Number of processes.
        device: Device on which this rank computes.
        backend: Communication backend.
        is_main: Whether this is rank 0.
        default_group: Group of all ranks.
        store: Store through which the ranks met, for small messages; None if the creator of the
            world keeps it.
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
        self._cleanup = contextlib.ExitStack()

    @classmethod
    def init(
        cls,
        *,
        backend: Backend | str = "auto",
        device: str = "auto",
        timeout_s: float = 600.0,
        store: dist.Store | None = None,
    ) -> Self:
        """Join the world that the environment describes, or create a world of one rank.

        The variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are read, as set by
        torchrun and SLURM wrappers, and LOCAL_WORLD_SIZE if it is set. Rank 0 listens on
        MASTER_ADDR. gloo listens on the interface that leads to MASTER_ADDR. If that is a loopback
        address, nothing listens on the network.

        Args:
            backend: ``gloo``, ``nccl``, or ``auto``, which uses nccl if torch's accelerator is CUDA
                and every rank of this node has a separate device, and otherwise gloo.
            device: ``cpu``, ``cuda`` or ``auto`` for the device of the backend. With ``cuda`` on
                gloo, ranks share this node's GPUs, and only reductions and broadcasts of GPU
                tensors work.
            timeout_s: Maximum time in seconds that a rank waits for the others.
            store: Store through which the ranks meet, instead of MASTER_ADDR and MASTER_PORT.

        Raises:
            ValueError: The environment is incomplete or invalid, the backend is not available here,
                or this process already has a world.
            NcclError: A ValueError about NCCL.
        """
        environment = find_place(os.environ, store=store)
        return cls.join(
            environment, backend=backend, device=device, timeout_s=timeout_s, store=store
        )

    @classmethod
    def join(
        cls,
        environment: RankEnvironment,
        *,
        backend: Backend | str = "auto",
        device: str = "auto",
        timeout_s: float = 600.0,
        store: dist.Store | None = None,
        connects_at_once: bool = True,
    ) -> Self:
        """Join a world as a given rank; like ``init``, but independent of the environment.

        Args:
            environment: Rank of this process and address of the world.
            backend: See ``init``.
            device: See ``init``.
            timeout_s: See ``init``.
            store: Store through which the ranks meet; None uses the address in ``environment``.
            connects_at_once: Whether NCCL connects all ranks before the first collective and splits
                later groups from that communicator. Point-to-point messages are then operations of
                their group, executed in order. Otherwise each pair of ranks connects separately at
                its first message.

        Raises:
            ValueError: The backend is not available here, or this process already has a world.
            NcclError: A ValueError about NCCL.
        """
        if dist.is_initialized():
            raise ValueError(
                "this process already has a world (or a torch default group): close() it, or "
                "call dist.destroy_process_group(), before World.init()"
            )
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: must be more than 0 seconds")
        if device == "cpu" and backend == "auto":
            backend = Backend.GLOO
        selected = choose_backend(str(backend), environment)
        rank_device = _device(selected, environment.local_rank, requested=device)
        timeout = timedelta(seconds=timeout_s)
        with contextlib.ExitStack() as cleanup:
            cleanup.enter_context(gloo_towards(environment.master_addr or "localhost"))
            cleanup.callback(setattr, sys, "excepthook", sys.excepthook)
            store = store or open_store(environment, timeout=timeout)
            cleanup.callback(_release, store)
            cleanup.enter_context(authenticated_groups(store, rank=environment.rank))
            dist.init_process_group(
                selected.torch_name,
                store=store,
                rank=environment.rank,
                world_size=environment.world_size,
                timeout=timeout,
                device_id=rank_device if selected is Backend.NCCL and connects_at_once else None,
            )
            world = cls(
                rank=environment.rank,
                local_rank=environment.local_rank,
                world_size=environment.world_size,
                device=rank_device,
                backend=selected,
                timeout_s=timeout_s,
                store=store,
            )
            world._cleanup = cleanup.pop_all()
        return world

    @classmethod
    def mock(
        cls, world_size: int, *, timeout_s: float = 60.0, device: torch.device | str = "cpu"
    ) -> MockWorld[Self]:
        """Describe a world of rank threads in this process; its ``run`` starts them.

        Args:
            world_size: Number of ranks.
            timeout_s: Maximum time in seconds that a rank may compute without communicating.
            device: ``cpu``, or ``cuda`` for one GPU that all ranks share.

        Raises:
            ValueError: ``world_size`` or ``timeout_s`` is not positive, or the device does not
                exist.
        """
        from axonlaunch.comm.mock import MockWorld  # most worlds don't need it

        return MockWorld(world_size, join=cls, timeout_s=timeout_s, device=device)

    def new_group(self, ranks: Iterable[int]) -> ProcessGroup:
        """Create a group of some ranks; every rank of the world must call this, members or not.

        Raises:
            ValueError: The list of ranks is empty, or contains a rank twice or a rank outside of
                the world.
            MismatchError: Ranks name different members (not detected on NCCL).
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
        torch_group = dist.new_group(members, timeout=timedelta(seconds=self.timeout_s))
        group = ProcessGroup(members, torch_group if self.rank in members else None)
        self._groups.append(group)
        return group

    def mesh(self, **sizes: int) -> Mesh:
        """Arrange the world's ranks on named axes, for example ``mesh(pp=2, dp_shard=2, tp=2)``.

        Consecutive ranks are neighbors along the last axis. Every rank must call this.

        Raises:
            ValueError: The product of the sizes is not the world size.
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
        """Arrange ranks like ``mesh``, with more options.

        Args:
            sizes: Number of ranks along each axis, outermost first.
            keep: Axes that stay in torch's mesh even if they have one rank.
            urgent: Axes with collectives that a GPU runs at high priority.
            with_host: Axes with groups that also communicate CPU tensors on NCCL; None for all
                axes.
        """
        # No timeout in a mock world, which detects deadlocks itself.
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
        """Leave the world and destroy its groups. A second call does nothing."""
        with self._cleanup:
            groups, self._groups = self._groups, []
            if groups and dist.is_initialized() and groups[0].torch_group is dist.group.WORLD:
                dist.destroy_process_group()
            for group in groups:
                group.close()
            self.store = None  # closes rank 0's listening port too

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Destroying NCCL's communicators waits for the peers, which may wait for this rank, so the
        # error would be reported only after their timeout. This process is about to end anyway.
        if kind is None or self.backend is not Backend.NCCL:
            self.close()

    def __repr__(self) -> str:
        return (
            f"World(rank={self.rank}, local_rank={self.local_rank}, "
            f"world_size={self.world_size}, device={str(self.device)!r}, "
            f"backend={self.backend.value!r})"
        )


def _release(store: dist.Store) -> None:
    """Keep a reference to the store until this is called, because torch keeps only its C++ part."""
    del store


def choose_backend(name: str, environment: RankEnvironment) -> Backend:
    """Return the backend for a user's setting.

    Raises:
        ValueError: The name is unknown, or its ranks are not processes.
    """
    if name == "auto":
        return Backend.NCCL if _every_local_rank_has_a_device(environment) else Backend.GLOO
    if name == Backend.MOCK:
        raise ValueError(
            "backend=mock: its ranks are threads that only World.mock(world_size).run(fn) starts"
        )
    if name not in [backend.value for backend in Backend]:
        raise ValueError(f"backend={name}: there is no such backend; use auto, gloo or nccl")
    return Backend(name)


def _every_local_rank_has_a_device(environment: RankEnvironment) -> bool:
    """Return whether each rank of this node has a separate device.

    All ranks of a node decide from the same facts, so they agree.
    """
    devices = gpus.device_count()
    if devices == 1 and not environment.on_loopback:
        return True  # a scheduler has assigned one device to each task
    needed = environment.local_world_size
    if needed is None:
        needed = environment.world_size if environment.on_loopback else environment.local_rank + 1
    return devices > 0 and devices >= needed


def _device(backend: Backend, local_rank: int, *, requested: str = "auto") -> torch.device:
    """Return this rank's device and make it the current one.

    If a rank sees only one device, that device was assigned to it, by ``--gpus-per-task=1`` or by a
    launcher that sets CUDA_VISIBLE_DEVICES for each rank.
    """
    if requested not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={requested}: there is no such device; use auto, cpu or cuda")
    if backend is not Backend.NCCL:
        return _shared_device(local_rank) if requested == "cuda" else torch.device("cpu")
    if requested == "cpu":
        raise NcclError("backend=nccl, device=cpu: NCCL works only on GPUs; use backend=gloo")
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
    """Return the GPU of a rank on gloo; the ranks of a node share its GPUs if necessary."""
    devices = torch.accelerator.device_count()
    if not devices:
        raise ValueError("device=cuda: torch sees no GPU here; use device=cpu")
    return _become_current(local_rank % devices)


def _become_current(index: int) -> torch.device:
    """Make a device the current one of this process and initialize CUDA on it.

    Without this, torch's device mesh would select the device with the index of the local rank,
    which may not be visible.
    """
    torch.accelerator.set_device_index(index)
    torch.cuda.init()
    return torch.device("cuda", index)
