"""The private names of torch that the fake world and its trace use still exist.

If one moved: only ``planning/tracing`` uses them. Find the replacement in torch's source, and run
``tests/planning/test_truth.py`` again.
"""

from __future__ import annotations

import inspect
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.configured import estimate_config
from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed import fake_pg

from axonlaunch.comm.torch_internals import all_gather_single
from axonlaunch.config import ConfigError
from axonlaunch.engines.expert import routing
from axonlaunch.models import register_model
from axonlaunch.models.fake.fake_tensor_cache import fake_tensor_mode
from axonlaunch.planning.memory.analytic import Formulas
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.tracing import fake_world
from axonlaunch.planning.tracing.devices import gloo_buffers
from axonlaunch.planning.tracing.storage_trace import StorageTrace, on_device
from axonlaunch.planning.tracing.untraceable import UNTRACEABLE
from axonlaunch.system.processes import forked_map

TINY = ["data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=4"]


def test_fake_process_group_has_fake_store() -> None:
    assert fake_pg.FakeStore()


def test_ddp_bucket_private_name_exists() -> None:
    reducer: Any = dist.Reducer
    assert callable(reducer._rebuild_buckets)


def test_pipeline_schedule_private_names_exist() -> None:
    schedules: Any = pipelining.schedules
    assert next(iter(inspect.signature(schedules._batch_p2p).parameters)) == "p2p_ops"
    warm_up = getattr(schedules._PipelineSchedule, "_warmup_p2p", None)
    assert warm_up is None or schedules.InferenceMode.STATIC is not None


def test_pipeline_stage_private_names_exist() -> None:
    stage: Any = pipelining.PipelineStage
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        assert list(inspect.signature(getattr(stage, name)).parameters)[1].endswith("chunk_id")
    assert "full_backward" in inspect.signature(stage.backward_one_chunk).parameters
    assert callable(stage._prepare_forward_infra)
    assert callable(stage._prepare_backward_infra)


def test_trace_ignores_dtensor_global_shapes() -> None:
    def largest() -> int:
        world = fake_world.join_fake_world(rank=0, world_size=2)
        mesh = init_device_mesh("cpu", (world.world_size,))
        with fake_tensor_mode(), StorageTrace() as trace:
            local = torch.ones(1 << 20)
            shards = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            trace.forget()
            del local
            shards.sigmoid_()
            trace.finish()
        return max(on_device(point) for event in trace.events for point in event.points)

    assert forked_map.map_forked([largest]) == [4 << 20]


def test_trace_counts_gloo_reduce_scatter_copy() -> None:
    def highest_and_last() -> tuple[int, int]:
        fake_world.join_fake_world(rank=0, world_size=2)
        functions = torch.ops._c10d_functional
        workspaces = gloo_buffers.collective_buffers
        with fake_tensor_mode(), StorageTrace(workspaces=workspaces) as trace:
            full = torch.ones(1 << 20)
            name = dist.group.WORLD.group_name
            part = functions.reduce_scatter_tensor(full, "sum", 2, name)
            del full
            part = functions.wait_tensor(part)
            trace.begin("after it")
            part = part + 1
            trace.finish()
        points = [on_device(point) for event in trace.events for point in event.points]
        return max(points), on_device(trace.events[-1].points[0])

    assert forked_map.map_forked([highest_and_last]) == [((4 + 4 + 2) << 20, 2 << 20)]


def test_trace_counts_gloo_all_gather_copies() -> None:
    def most(*, async_op: bool) -> int:
        fake_world.join_fake_world(rank=0, world_size=2)
        with fake_tensor_mode(), StorageTrace(workspaces=gloo_buffers.collective_buffers) as trace:
            full_tensors = [torch.ones(n << 20) for n in (8, 4, 2, 1)]
            trace.forget()
            for full in full_tensors:
                all_gather_single(full, full[: len(full) // 2], async_op=async_op)
            trace.begin("after them")
            trace.finish()
        initial, *points = [on_device(point) for event in trace.events for point in event.points]
        assert points[-1] == initial == 4 * 15 << 20
        return max(points) - initial

    runs = [partial(most, async_op=False), partial(most, async_op=True)]
    assert forked_map.map_forked(runs) == [4 * 8 << 20, 4 * (8 + 4) << 20]


def test_trace_counts_gloo_functional_all_gather_copy() -> None:
    def points() -> list[int]:
        fake_world.join_fake_world(rank=0, world_size=2)
        functions = torch.ops._c10d_functional
        with fake_tensor_mode(), StorageTrace(workspaces=gloo_buffers.collective_buffers) as trace:
            name = dist.group.WORLD.group_name
            full = functions.all_gather_into_tensor(torch.ones(1 << 20), 2, name)
            trace.begin("after it")
            full = functions.wait_tensor(full)
            trace.finish()
            trace.begin("after that")
        most = max(map(on_device, trace.events[0].points))
        return [most, *(on_device(event.points[0]) for event in trace.events[1:])]

    # Sent tensors are held until the result is waited for.
    assert forked_map.map_forked([points]) == [[(4 + 8 + 8) << 20, (4 + 8) << 20, 8 << 20]]


def test_a_backward_is_reported_by_its_graph_task() -> None:
    tasks = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: tasks.append(torch._C._current_graph_task_id()))
    y.sum().backward()
    assert tasks[0] != -1 == torch._C._current_graph_task_id()


def test_reading_fake_tensor_value_raises_known_error() -> None:
    with fake_tensor_mode():
        value = torch.ones(2).sum()
        with pytest.raises(UNTRACEABLE):
            bool(value > 0)
        with fake_world.assume_true():
            assert bool(value > 0)
    assert issubclass(fake_tensor.DataDependentOutputException, UNTRACEABLE)


class Branching(torch.nn.Linear):
    """Branches on the values of a tensor."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs.flatten(1))
        return outputs if outputs.sum() > 0 else -outputs


def branching() -> torch.nn.Module:
    return Branching(784, 10)


def test_a_model_that_branches_on_values_is_refused_by_name() -> None:
    overrides = ["model=custom", f"model.target={__name__}:branching", "data=digits"]
    chosen = estimate_config([*overrides, "launch.nproc=2", "data.image_size=28"])
    with pytest.raises(ConfigError, match=r"aten\._local_scalar_dense in Branching depends on v"):
        estimate(chosen)


def test_a_module_that_fails_is_reported_with_its_reason_and_the_line() -> None:
    overrides = ["model=custom", f"model.target={__name__}:misfitting", "data=digits"]
    overrides += ["data.image_size=8", "train.global_batch_size=32"]
    chosen = estimate_config([*overrides, "launch.nproc=2"])
    with pytest.raises(ConfigError) as refused:
        estimate(chosen)
    (problem,) = refused.value.problems
    assert "a micro-batch of 16 fails in Misfitting with RuntimeError" in problem.message
    assert "test_fake_world.py:" in problem.message


class Misfitting(torch.nn.Linear):
    """Takes inputs of another size than it gets."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)


def misfitting() -> torch.nn.Module:
    return Misfitting(7, 10)


def vast() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 1 << 34, bias=False))


def test_self_initializing_model_is_traced_without_storage() -> None:
    overrides = [
        "model=custom",
        f"model.target={__name__}:vast",
        "data=digits",
        "data.image_size=8",
    ]
    checked = estimate_config([*overrides, "launch.nproc=2"])
    assert estimate(checked).parameters == 64 << 34


def test_existing_process_group_is_not_reused_as_fake_world() -> None:
    from axonlaunch.comm import World

    with World.init(backend="gloo"), pytest.raises(ValueError, match="has a world already"):
        fake_world.join_fake_world(rank=0, world_size=4)


@pytest.mark.parametrize(
    ("load", "received"),
    [(1.0, 4 * 8), (2.0, 4 * 16), (9.0, 4 * 32), (float("inf"), 4 * 32)],
)
def test_assumed_routes_bring_load_to_rank(load: float, received: int) -> None:
    # 16 tokens with 2 of 8 experts on each of 4 ranks; this rank has 2 experts
    def counts() -> tuple[int, list[int], int]:
        fake_world.join_fake_world(rank=1, world_size=4, expert_load=load)
        group: Any = SimpleNamespace(size=4, rank=1)
        sent, arriving = routing.read_counts(
            torch.empty(9), torch.empty(8), experts=torch.empty(16, 2), group=group
        )
        return sum(sent), [sum(arriving), sent[2] + sent[3]], sent[8]

    assert forked_map.map_forked([counts]) == [(32, [received, received // 4], 0)]


def test_update_with_overflow_check_is_traced() -> None:
    shallow = ["model.num_hidden_layers=2", "strategy=fsdp", "launch.nproc=2"]
    chosen = estimate_config([*TINY, *shallow, "train.precision=fp16"])
    assert estimate(chosen).peak_bytes > 0


@pytest.mark.slow
def test_forking_traces_runs_no_backward_in_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A build for GPUs starts threads for backward; forks can't use them."""
    graph: Any = torch.autograd.graph
    run, here = graph._engine_run_backward, os.getpid()

    def run_elsewhere(*args: Any, **kwargs: Any) -> Any:
        assert os.getpid() != here
        return run(*args, **kwargs)

    for owner in (graph, torch.autograd):
        monkeypatch.setattr(owner, "_engine_run_backward", run_elsewhere)
    shallow = ["model.num_hidden_layers=2", "strategy=fsdp", "launch.nproc=2"]
    chosen = estimate_config([*TINY, *shallow, "hardware=h100_80gb"])
    assert estimate(chosen).process_bytes > 0
    assert Formulas.of(chosen).process_bytes(chosen) > 0


@pytest.mark.slow
def test_tensor_plan_of_some_blocks_traces_all_blocks() -> None:
    overrides = [
        "model=llama_debug",
        "strategy=tensor",
        "launch.nproc=2",
        "model.num_hidden_layers=8",
    ]
    styles = {"up_proj": "column", "gate_proj": "column", "down_proj": "row"}
    plan = ",".join(f"layers.5.mlp.{name}: {style}" for name, style in styles.items())
    chosen = estimate_config([*TINY, *overrides, f"strategy.tensor.plan={{{plan}}}"])
    assert estimate(chosen) == estimate(chosen, exact=True)


def test_a_plan_that_fits_no_model_is_reported_by_its_key() -> None:
    overrides = ["model=llama_debug", "strategy=tensor", "launch.nproc=2"]
    chosen = estimate_config([*TINY, *overrides, "strategy.tensor.plan={*.up_proj: column}"])
    with pytest.raises(
        ConfigError, match=r"strategy\.tensor\.plan: sharded by this plan, the model fails"
    ):
        estimate(chosen)


class Linears(nn.Module):
    """Blocks that return views of a matrix product's result."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_torch_warns_of_no_view_that_a_block_returns_in_an_estimate() -> None:
    register_model("linears", layers="layers", inputs="tokens")(Linears)
    overrides = ["model=linears", "strategy=fsdp", "launch.nproc=2", "hardware=cpu", *TINY]
    assert estimate(estimate_config(overrides)).ranks  # a warning is an error here


def test_fused_update_of_sgd_needs_no_memory() -> None:
    """torch defines fused updates of fake tensors for Adam alone, and runs others on real ones."""

    def update() -> bool:
        fake_world.define_fake_sgd()
        with fake_tensor_mode():
            weight = nn.Parameter(torch.empty(2**48, device="cpu"))
            weight.grad = torch.empty_like(weight)
            torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True).step()
        return True

    assert forked_map.map_forked([update]) == [True]
