"""One rank of a world of any size, alone in its process, on tensors that have no bytes.

Everything private to torch that this takes is here, and ``tests/planning/test_fake_world.py``
holds it and says what to do when it moves. It never undoes what it does to torch: it belongs in
a process that is forked for one rank and ends with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.tensor._op_schema import DTensorSpec, OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from axonlaunch.comm import World
from axonlaunch.comm.backend import Backend
from axonlaunch.planning.tracing.dispatch_mode import UncompiledDispatchMode


def join(*, rank: int, world_size: int) -> World:
    """Stand as one rank in a world whose other ranks are not there.

    Raises:
        ValueError: This process has a world already.
    """
    if dist.is_initialized():
        raise ValueError(
            "this process has a world already, and an estimate makes its own: close() it, or "
            "estimate in another process"
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    patch_ddp_reducer()
    _let_pipelines_run_alone()
    _let_messages_hold_tensors()
    hide_sharding_propagation()
    _let_updates_stay_where_they_are()
    return World(
        rank=rank,
        local_rank=0,
        world_size=world_size,
        device=torch.device("cpu"),
        backend=Backend.MOCK,
    )


class BranchTrueMode(UncompiledDispatchMode):
    """Answers True wherever code asks a fake tensor, which has no value, for one.

    The code that asks is fp16's: "are all gradients finite?"
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True
        return func(*args, **(kwargs or {}))


@contextmanager
def assume_true() -> Iterator[None]:
    """Let a decision on a tensor that has no value be the usual one: fp16 did not overflow."""
    with BranchTrueMode():  # type: ignore[no-untyped-call]
        yield


def patch_ddp_reducer() -> None:
    """Let torch's DDP go through its steps without values.

    Its reducer looks into gradients to lay its buckets out anew, which moves no byte of their sum,
    and all-reduces from C++; a hook that is done at once takes the place of that.
    """
    wrap: Any = nn.parallel.DistributedDataParallel.__init__

    def wrap_and_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        wrap(self, *args, **kwargs)
        # torch compares annotations, which are strings here; a lambda has none.
        self.register_comm_hook(None, lambda state, bucket: _already_reduced(bucket))

    nn.parallel.DistributedDataParallel.__init__ = wrap_and_hook  # type: ignore[method-assign]
    dist.Reducer._rebuild_buckets = lambda self: False  # type: ignore[method-assign]


def _already_reduced(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _let_pipelines_run_alone() -> None:
    """Let torch's schedules take the shapes that they are given; up to torch 2.11 they do."""
    schedule: Any = pipelining.schedules._PipelineSchedule
    if not hasattr(schedule, "_warmup_p2p"):
        return
    static = pipelining.schedules.InferenceMode.STATIC

    def be_static(self: Any, stages: Any, *_: Any) -> None:
        del self
        for stage in stages:
            stage._inference_mode = static

    schedule._warmup_p2p = be_static


class _InFlight:
    """Messages on their way: like a backend's work, it holds their tensors while it lives."""

    def __init__(self, works: Sequence[Any], tensors: list[torch.Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _let_messages_hold_tensors() -> None:
    """Let what a pipeline sends stay alive until it has waited for it and forgets it."""
    schedules: Any = pipelining.schedules
    begin = schedules._batch_p2p

    def begin_and_hold(messages: Any, *args: Any, **kwargs: Any) -> list[_InFlight]:
        works = begin(messages, *args, **kwargs)
        return [_InFlight(works, [message.tensor for message in messages])]

    schedules._batch_p2p = begin_and_hold


def hide_sharding_propagation() -> None:
    """Let DTensor plan an operation, on tensors of global shape, where no mode follows it."""
    propagator: Any = ShardingPropagator
    plan = propagator._propagate_tensor_meta_non_cached

    def plan_unseen(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return plan(self, *args, **kwargs)

    propagator._propagate_tensor_meta_non_cached = plan_unseen


def _let_updates_stay_where_they_are() -> None:
    """Let DTensor find at once that an update needs no message.

    It would weigh every division of every tensor, for a tenth of a trace.
    """
    propagator: Any = ShardingPropagator
    plan = propagator.propagate_op_sharding_non_cached

    def plan_at_once(self: Any, schema: OpSchema) -> OutputSharding:
        if schema.op in _UPDATES and _are_divided_alike(schema):
            return OutputSharding(None)
        found: OutputSharding = plan(self, schema)
        return found

    propagator.propagate_op_sharding_non_cached = plan_at_once


_UPDATES = frozenset({torch.ops.aten._fused_adamw_.default})


def _are_divided_alike(schema: OpSchema) -> bool:
    """Whether each parameter, its gradient and its states are divided alike, none to be summed."""
    lists = [specs for specs in schema.args_schema if isinstance(specs, list | tuple) and specs]
    for specs in zip(*lists, strict=True):
        if not all(isinstance(one, DTensorSpec) for one in specs):
            return False
        parameter, *others = specs
        if any(placement.is_partial() for placement in parameter.placements):
            return False
        if any(one.placements != parameter.placements for one in others if one.shape):
            return False
        if any(not p.is_replicate() for one in others if not one.shape for p in one.placements):
            return False
    return True
