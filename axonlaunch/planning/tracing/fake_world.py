"""Simulates one rank of a world of any size, in a single process and on fake tensors.

All private functions of torch that this needs are used in this module.
``tests/planning/test_fake_world.py`` checks them and says what to do if one moves. The patches are
never undone: use this module in a process that is forked for one rank and ends with it.

Patched, each by one function below, with the problem that it avoids:

    DDP.__init__, Reducer._rebuild_buckets     the C++ reducer reads gradients, which have no bytes
    _PipelineSchedule._warmup_p2p              stages would ask absent neighbors for shapes
    schedules._batch_p2p                       a sent tensor would count as freed too early
    ShardingPropagator._propagate_...          DTensor's planning would count as memory of a step
    routing.read_counts                        the chosen experts of a token are unknown
    aten._fused_sgd_                           no fake version: it would run on real tensors
    aten._local_scalar_dense                   ``if grad.isfinite().all()`` has no answer

The last one applies only inside ``assume_true``. An example: ``bool(fake > 0)`` is True, and
``float(fake)`` is 0.5.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from axonlaunch.comm import World
from axonlaunch.comm.backend import Backend
from axonlaunch.comm.process_group import ProcessGroup
from axonlaunch.engines.expert import routing
from axonlaunch.models.fake.fake_tensor_cache import with_tensor_values
from axonlaunch.planning.tracing.dispatch_mode import UncompiledDispatchMode


def join_fake_world(*, rank: int, world_size: int, expert_load: float = 1.0) -> World:
    """Join a fake world as one rank; the other ranks do not exist.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        expert_load: Rows that a rank's experts receive, relative to a balanced router; ``inf`` for
            as many as possible.

    Raises:
        ValueError: This process already has a world.
    """
    if dist.is_initialized():
        raise ValueError(
            "this process has a world already, and an estimate makes its own: close() it, or "
            "estimate in another process"
        )
    hide_gpus()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    patch_ddp_reducer()
    use_static_pipeline_shapes()
    keep_sent_tensors()
    hide_sharding_propagation()
    assume_routes(expert_load)
    define_fake_sgd()
    return World(
        rank=rank,
        local_rank=0,
        world_size=world_size,
        device=torch.device("cpu"),
        backend=Backend.MOCK,
    )


def hide_gpus() -> None:
    """Hide all GPUs from torch in this process, before CUDA is initialized.

    Adam checks whether the current stream is being captured into a graph. That would initialize
    CUDA, whose context needs memory on a device that may be training another run.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pretend_backend(backend: Backend) -> None:
    """Report ``backend`` for groups of the fake world, because messages depend on the backend."""
    real_of_torch = Backend.of_torch

    def torch_or_fake_backend(name: str) -> Backend:
        return backend if name == "fake" else real_of_torch(name)

    Backend.of_torch = torch_or_fake_backend  # type: ignore[method-assign]


_DEFINED = torch.library.Library("aten", "IMPL")
"""Owner of the definitions below, which end with it."""


def define_fake_sgd() -> None:
    """Define the fused update of SGD for fake tensors: it changes values, which they do not have.

    torch defines only those of Adam, and runs others on real tensors of the same sizes.
    """
    _DEFINED.impl("_fused_sgd_", lambda *args, **kwargs: None, "Meta")


_SCALAR = 0.5
"""Value of floating-point scalars: true, and not 1, because NAdam divides by ``1 - value``."""


class BranchTrueMode(UncompiledDispatchMode):
    """Returns True, or a true number, when code reads the value of a fake tensor.

    Two places read one: fp16 checks whether all gradients are finite, and some optimizers compute
    with their step count.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _SCALAR if args[0].is_floating_point() else True
        return func(*args, **(kwargs or {}))


@contextmanager
def assume_true() -> Iterator[None]:
    """Let decisions on fake tensors take the usual branch: fp16 did not overflow."""
    with BranchTrueMode():  # type: ignore[no-untyped-call]
        yield


def patch_ddp_reducer() -> None:
    """Patch torch's DDP so that its steps need no values.

    The reducer reads gradients to rebuild its buckets, which is skipped: it does not change their
    total size. Its all-reduce in C++ is replaced by a communication hook that finishes at once.
    """
    original_init: Any = nn.parallel.DistributedDataParallel.__init__

    def wrap_and_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        # torch checks the annotations of the hook, which are strings here; a lambda has none.
        self.register_comm_hook(None, lambda state, bucket: _already_reduced(bucket))

    nn.parallel.DistributedDataParallel.__init__ = wrap_and_hook  # type: ignore[method-assign]
    dist.Reducer._rebuild_buckets = lambda self: False  # type: ignore[method-assign]


def _already_reduced(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def use_static_pipeline_shapes() -> None:
    """Let torch's pipeline schedules use the given shapes, as in torch 2.11 and earlier."""
    schedule: Any = pipelining.schedules._PipelineSchedule
    if not hasattr(schedule, "_warmup_p2p"):
        return
    static = pipelining.schedules.InferenceMode.STATIC

    def use_static_shapes(self: Any, stages: Any, *_: Any) -> None:
        del self
        for stage in stages:
            stage._inference_mode = static

    schedule._warmup_p2p = use_static_shapes


class _InFlight:
    """Messages in flight. Like the work object of a real backend, it keeps their tensors alive."""

    def __init__(self, works: Sequence[Any], tensors: list[torch.Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def keep_sent_tensors() -> None:
    """Keep the tensors that a pipeline sends alive until it has waited for them."""
    schedules: Any = pipelining.schedules
    original_batch = schedules._batch_p2p

    def begin_and_hold(messages: Any, *args: Any, **kwargs: Any) -> list[_InFlight]:
        works = original_batch(messages, *args, **kwargs)
        return [_InFlight(works, [message.tensor for message in messages])]

    schedules._batch_p2p = begin_and_hold


def assume_routes(load: float) -> None:
    """Let each rank that shares experts send as many rows to this rank as ``load`` implies.

    A token has at most one row for each expert, which limits the load. The remaining rows are
    distributed evenly among the other ranks.

    Args:
        load: Rows that this rank receives, relative to a balanced router.
    """

    def assumed_counts(
        sent: Tensor, received: Tensor, *, experts: Tensor, group: ProcessGroup
    ) -> tuple[list[int], list[int]]:
        tokens, top_k = experts.shape
        per_rank = len(received) // group.size
        rows, others = tokens * top_k, group.size - 1
        most = tokens * min(top_k, per_rank)
        kept = most if math.isinf(load) else min(most, round(load * rows / group.size))
        rest = [(rows - kept + other) // others for other in range(others)]
        rest.insert(group.rank, kept)
        # How a rank's rows are distributed among its experts does not change any size.
        zeros = [0] * (per_rank - 1)
        to_ranks = [number for count in rest for number in (count, *zeros)]
        return [*to_ranks, *[0] * (len(sent) - len(to_ranks))], [kept, *zeros] * group.size

    routing.read_counts = assumed_counts


@contextmanager
def watch_host_waits(waiting: Callable[[], None]) -> Iterator[None]:
    """Call ``waiting`` whenever divided experts wait for the sizes of their exchanges."""
    read_counts = routing.read_counts

    def read_and_report(*args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        waiting()
        return read_counts(*args, **kwargs)

    routing.read_counts = read_and_report
    try:
        yield
    finally:
        routing.read_counts = read_counts


def hide_sharding_propagation() -> None:
    """Hide DTensor's planning, which runs operations on tensors of global shape, from modes."""
    propagator: Any = ShardingPropagator
    original_propagate = propagator._propagate_tensor_meta_non_cached

    def propagate_untraced(self: Any, *args: Any, **kwargs: Any) -> Any:
        with with_tensor_values():
            return original_propagate(self, *args, **kwargs)

    propagator._propagate_tensor_meta_non_cached = propagate_untraced
