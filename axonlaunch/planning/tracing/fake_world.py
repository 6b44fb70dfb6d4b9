"""One rank of a world of any size, alone in its process, on fake tensors.

Everything private to torch that this takes is here, and ``tests/planning/test_fake_world.py``
holds it and says what to do when it moves. It never undoes what it does to torch: it belongs in
a process that is forked for one rank and ends with it.

What is replaced in torch, each by one function below, and what would go wrong:

    DDP.__init__, Reducer._rebuild_buckets     the C++ reducer reads gradients, which have no bytes
    _PipelineSchedule._warmup_p2p              stages would ask absent neighbours for shapes
    schedules._batch_p2p                       a sent tensor would count as freed too early
    ShardingPropagator._propagate_...          DTensor's planning would count as memory of a step
    aten._local_scalar_dense                   ``if grad.isfinite().all()`` has no answer

An example of the last, only inside of ``assume_true``: ``bool(fake > 0)`` is True, and
``float(fake)`` is 0.5.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from axonlaunch.comm import World
from axonlaunch.comm.backend import Backend
from axonlaunch.models.fake_tensor_cache import with_tensor_values
from axonlaunch.planning.tracing.dispatch_mode import UncompiledDispatchMode


def join_fake_world(*, rank: int, world_size: int) -> World:
    """Join a fake world as one rank; the other ranks do not exist.

    Raises:
        ValueError: This process has a world already.
    """
    if dist.is_initialized():
        raise ValueError(
            "this process has a world already, and an estimate makes its own: close() it, or "
            "estimate in another process"
        )
    hide_gpus()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    patch_ddp_reducer()
    let_pipelines_run_alone()
    let_messages_hold_tensors()
    hide_sharding_propagation()
    return World(
        rank=rank,
        local_rank=0,
        world_size=world_size,
        device=torch.device("cpu"),
        backend=Backend.MOCK,
    )


def hide_gpus() -> None:
    """Let torch see no GPU in this process, in which CUDA is not initialised.

    Adam asks whether the device's stream is being captured into a graph, which would initialise
    CUDA, and take a context's memory of a device on which a run may be training.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pass_for(backend: Backend) -> None:
    """Let groups of the fake world pass for a backend's, where what ranks send depends on that."""
    of_torch = Backend.of_torch

    def of_fake(name: str) -> Backend:
        return backend if name == "fake" else of_torch(name)

    Backend.of_torch = of_fake  # type: ignore[method-assign]


_VALUE = 0.5
"""Of every fraction: true, and neither 0 nor 1, by whose difference from it NAdam divides."""


class BranchTrueMode(UncompiledDispatchMode):
    """Answers True, or a number that is, wherever code asks a fake tensor, which has none.

    The code that asks is fp16's, "are all gradients finite?", and optimizers' that compute with
    their count of steps.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _VALUE if args[0].is_floating_point() else True
        return func(*args, **(kwargs or {}))


@contextmanager
def assume_true() -> Iterator[None]:
    """Let a decision on a tensor that has no value be the usual one: fp16 did not overflow."""
    with BranchTrueMode():  # type: ignore[no-untyped-call]
        yield


def patch_ddp_reducer() -> None:
    """Patch torch's DDP so that its steps need no values.

    Its reducer looks into gradients to lay its buckets out again, which moves no byte of their sum,
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


def let_pipelines_run_alone() -> None:
    """Let torch's schedules use the shapes that they are given, as they do up to torch 2.11."""
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


def let_messages_hold_tensors() -> None:
    """Keep tensors that a pipeline sends alive until it has waited for them."""
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
        with with_tensor_values():
            return plan(self, *args, **kwargs)

    propagator._propagate_tensor_meta_non_cached = plan_unseen
