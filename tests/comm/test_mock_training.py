"""torch's parallel training, unchanged, on the mock world: equal to one process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.torch_training import (
    STEPS,
    TENSOR_PLAN,
    make_batch,
    make_model,
    make_optimizer,
    mean_loss,
    pipeline_loss,
    shard,
    step,
    train,
    train_by_sync_gradients,
    train_ddp,
    train_ddp_with_gradients_in_buckets,
    train_fsdp,
    train_hsdp,
    train_pipeline,
    train_tensor,
    train_tensor_and_fsdp,
    weights,
)
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    parallelize_module,
)

from axonlaunch import comm
from axonlaunch.comm import World
from axonlaunch.comm.mock.process_group import MockProcessGroup


@pytest.fixture(scope="module")
def alone() -> tuple[Tensor, list[Tensor]]:
    model = make_model()
    return train(model, make_batch()), weights(model)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("train_on", "size"),
    [
        (train_ddp, 4),
        (train_ddp, 2),
        (train_ddp_with_gradients_in_buckets, 2),
        (train_fsdp, 4),
        (train_by_sync_gradients, 4),
        (train_fsdp, 2),
        (partial(train_fsdp, reshard_after_forward=False), 2),
        (partial(train_fsdp, offload_policy=CPUOffloadPolicy(pin_memory=False)), 2),
        (train_hsdp, 4),
        (train_tensor, 2),
        (train_tensor_and_fsdp, 4),
        (train_tensor, 4),
    ],
)
def test_mock_training_equals_one_process(
    train_on: Callable[[World], Any], size: int, alone: tuple[Tensor, list[Tensor]]
) -> None:
    for losses, parameters in World.mock(size).run(train_on):
        torch.testing.assert_close(losses, alone[0], rtol=1e-5, atol=1e-7)
        for ours, reference in zip(parameters, alone[1], strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


def test_mock_fsdp_in_mixed_precision_is_close() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = make_model()
    expected = train(model, make_batch())
    for losses, _ in World.mock(4).run(train_fsdp, mp_policy=policy):
        torch.testing.assert_close(losses, expected, rtol=2e-2, atol=0)


# Pipelines.


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("schedule", "size", "stages_per_rank"),
    [
        ("ScheduleGPipe", 4, 1),
        ("Schedule1F1B", 2, 1),
        ("Schedule1F1B", 4, 1),
        ("ScheduleInterleaved1F1B", 2, 2),
        ("ScheduleLoopedBFS", 2, 2),
        ("ScheduleInterleavedZeroBubble", 2, 2),
        ("ScheduleZBVZeroBubble", 2, 2),
    ],
)
def test_mock_pipeline_equals_one_process(
    schedule: str, size: int, stages_per_rank: int, alone: tuple[Tensor, list[Tensor]]
) -> None:
    outcomes = World.mock(size).run(train_pipeline, schedule, stages_per_rank)
    curves = [curve for curve, _ in outcomes if curve is not None]
    assert len(curves) == 1
    torch.testing.assert_close(curves[0], alone[0], rtol=1e-5, atol=1e-7)
    by_stage = {index: tensors for _, stages in outcomes for index, tensors in stages.items()}
    ours = [tensor for index in sorted(by_stage) for tensor in by_stage[index]]
    for mine, other in zip(ours, alone[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # the engines' mixtures run by default
def test_pipeline_and_fsdp_and_tensor_parallel_together(
    alone: tuple[Tensor, list[Tensor]],
) -> None:
    def train_all(world: World) -> Tensor | None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "shard", "tp"))
        stage_index = mesh.get_local_rank("pp")
        blocks = make_model()[2 * stage_index : 2 * stage_index + 2]
        for block in blocks:
            parallelize_module(block, mesh["tp"], TENSOR_PLAN)
            fully_shard(block, mesh=mesh["shard"])
        stage = pipelining.PipelineStage(
            blocks, stage_index, 2, torch.device("cpu"), group=mesh["pp"].get_group()
        )
        schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=pipeline_loss)
        optimizer = make_optimizer(blocks)
        inputs, targets = make_batch(mesh.get_local_rank("shard"), 2)
        curve = []
        for _ in range(STEPS):
            losses: list[Tensor] = []
            if stage_index:
                schedule.step(target=targets, losses=losses)
            else:
                schedule.step(inputs)
            optimizer.step()
            optimizer.zero_grad()
            if losses:
                mean = torch.stack(losses).mean().detach()
                dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=mesh["shard"].get_group())
                curve.append(mean)
        return torch.stack(curve) if curve else None

    curves = [curve for curve in World.mock(8).run(train_all) if curve is not None]
    assert len(curves) == 4
    for curve in curves:
        torch.testing.assert_close(curve, alone[0], rtol=1e-5, atol=1e-7)


# Determinism.


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("train_on", [train_ddp, train_tensor, train_fsdp, train_hsdp])
def test_training_twice_gives_the_same_bits(train_on: Callable[[World], Any]) -> None:
    first, second = (World.mock(4).run(train_on) for _ in range(2))
    for (losses, parameters), (again, others) in zip(first, second, strict=True):
        assert torch.equal(losses, again)
        assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))


def test_training_with_dropout_twice_gives_the_same_bits() -> None:
    def train_dropout(world: World) -> tuple[Tensor, list[float]]:
        model = shard(make_model(0.3), init_device_mesh("cpu", (world.world_size,)))
        torch.manual_seed(world.rank)
        losses = train(model, make_batch(world.rank, world.world_size))
        return losses, torch.rand(3).tolist()

    first, second = (World.mock(4).run(train_dropout) for _ in range(2))
    for (losses, numbers), (again, others) in zip(first, second, strict=True):
        assert torch.equal(losses, again)
        assert numbers == others
    assert len({tuple(numbers) for _, numbers in first}) == 4


# Cleaning up.


@pytest.mark.slow
def test_meshes_and_groups_are_forgotten_after_a_run() -> None:
    def groups() -> int:
        gc.collect()
        return sum(type(item) is MockProcessGroup for item in gc.get_objects())

    previous_groups = groups()
    kinds = [train_ddp, train_fsdp, train_hsdp, train_tensor]
    if torch.__version__ < (2, 13):
        kinds = kinds[:1]  # DTensor's caches already kept meshes, on any backend
    for train_on in kinds:
        World.mock(4).run(lambda world, train_on=train_on: train_on(world) and None)
        World.mock(2).run(lambda world: train_pipeline(world, "Schedule1F1B", 1) and None)
    assert groups() == previous_groups


def test_meshes_of_later_mock_run_are_separate() -> None:
    def use(world: World, num_groups_before: int) -> None:
        for _ in range(num_groups_before):  # changes the names of the mesh's groups
            dist.new_group([0])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mesh._flatten("ab")
        full = torch.arange(64.0).reshape(8, 8)
        sharded = distribute_tensor(full, mesh, [Shard(0), Shard(0)])
        assert torch.equal((sharded * 2).full_tensor(), full * 2)
        assert torch.equal((sharded @ whole_like(sharded)).full_tensor(), full @ full)
        assert torch.equal(sharded.sum(0).full_tensor(), full.sum(0))

    def whole_like(sharded: DTensor) -> DTensor:
        return sharded.redistribute(placements=[Replicate(), Replicate()])

    for num_groups_before in (0, 3, 1, 2):
        World.mock(4, timeout_s=20).run(use, num_groups_before)


# Checkpoints.


@pytest.mark.slow
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(4, 4), (4, 2), (2, 4)])
def test_mock_checkpoint_resumes_on_same_or_other_rank_count(
    tmp_path: Path, saved_on: int, loaded_on: int, alone: tuple[Tensor, list[Tensor]]
) -> None:
    def prepare(world: World) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = shard(make_model(), init_device_mesh("cpu", (world.world_size,)))
        return model, make_optimizer(model), make_batch(world.rank, world.world_size)

    def save(world: World) -> None:
        model, optimizer, batch = prepare(world)
        step(model, optimizer, batch)
        states = get_state_dict(model, optimizer)
        dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=tmp_path)

    def load(world: World) -> Tensor:
        model, optimizer, batch = prepare(world)
        states = get_state_dict(model, optimizer)
        state = dict(zip(("model", "optimizer"), states, strict=True))
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        losses = [step(model, optimizer, batch) for _ in range(STEPS - 1)]
        return mean_loss(torch.stack(losses))

    World.mock(saved_on).run(save)
    for losses in World.mock(loaded_on).run(load):
        torch.testing.assert_close(losses, alone[0][1:], rtol=1e-5, atol=1e-7)


# Time.


def test_an_fsdp_step_of_8_ranks_computes_for_a_fraction_of_a_second() -> None:
    """CPU time of all ranks, because wall time depends on the machine's load."""

    def measure(world: World) -> float:
        model = shard(make_model(), init_device_mesh("cpu", (world.world_size,)))
        optimizer, batch = make_optimizer(model), make_batch(world.rank, world.world_size)
        step(model, optimizer, batch)
        comm.barrier()
        start = time.process_time()
        for _ in range(3):
            step(model, optimizer, batch)
        comm.barrier()
        return (time.process_time() - start) / 3

    assert max(World.mock(8).run(measure)) < 2
