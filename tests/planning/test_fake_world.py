"""The private names of torch that the fake world and its trace stand on are where they were.

If one moved: ``planning/fake_world.py`` and ``planning/trace.py`` alone use them; look for what
took its place in torch's own source, and hold ``tests/planning/test_truth.py`` to it again.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch.distributed import pipelining
from torch.testing._internal.distributed import fake_pg

from axonlaunch import config
from axonlaunch.config import ConfigError
from axonlaunch.planning import fake_world
from axonlaunch.planning.memory import estimate

TINY = ["data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=4"]


def test_the_fake_backend_has_its_store() -> None:
    assert fake_pg.FakeStore()


def test_replicas_lay_their_buckets_out_by_this_name() -> None:
    reducer: Any = dist.Reducer
    assert callable(reducer._rebuild_buckets)


def test_schedules_begin_messages_and_agree_on_shapes_by_these_names() -> None:
    schedules: Any = pipelining.schedules
    assert next(iter(inspect.signature(schedules._batch_p2p).parameters)) == "p2p_ops"
    warm_up = getattr(schedules._PipelineSchedule, "_warmup_p2p", None)
    assert warm_up is None or schedules.InferenceMode.STATIC is not None


def test_a_backward_is_told_by_its_graph_task() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(torch._C._current_graph_task_id()))
    y.sum().backward()
    assert seen[0] != -1 == torch._C._current_graph_task_id()


def test_a_value_that_is_asked_for_is_an_error_of_a_known_kind() -> None:
    with fake_world.tensors_without_bytes():
        value = torch.ones(2).sum()
        with pytest.raises(fake_world.UNTRACEABLE) as raised:
            bool(value > 0)
        with fake_world.answering_yes():
            assert bool(value > 0)
    assert fake_world.operation(raised.value) == "aten._local_scalar_dense"
    assert issubclass(fake_tensor.DataDependentOutputException, fake_world.UNTRACEABLE)


class Branching(torch.nn.Linear):
    """Computes by what the values are."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs.flatten(1))
        return outputs if outputs.sum() > 0 else -outputs


def branching() -> torch.nn.Module:
    return Branching(784, 10)


def test_a_model_that_branches_on_values_is_refused_by_name() -> None:
    overrides = ["model=custom", f"model.target={__name__}:branching", "data=digits"]
    chosen = config.load([*overrides, "launch.nproc=2", "data.image_size=28"])
    with pytest.raises(ConfigError, match=r"aten\._local_scalar_dense in Branching depends on v"):
        estimate(chosen)


def test_a_world_that_is_there_already_is_not_taken_for_another() -> None:
    from axonlaunch.comm import World

    with World.init(backend="gloo"), pytest.raises(ValueError, match="has a world already"):
        fake_world.join(rank=0, world_size=4)


def test_an_update_that_looks_for_overflow_is_traced() -> None:
    chosen = config.load([*TINY, "train.precision=fp16", "strategy=fsdp", "launch.nproc=2"])
    assert estimate(chosen).peak_bytes > 0
