"""Pipelines in plain Python: a list of modules, a schedule, and the values of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from axonlaunch import comm
from axonlaunch.comm import Backend, RankFailedError, World
from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.engines.pipeline.pipeline import Pipeline
from axonlaunch.engines.pipeline.schedule import PipelineSchedule

WIDTH, BATCH = 8, 16


def modules(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    both = torch.randn(2, BATCH, WIDTH, generator=generator)
    return both[0], both[1]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets, reduction="sum")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline_equals_one_process(schedule: str, ranks: int) -> None:
    stages = ranks * SCHEDULES[schedule].stages_per_rank
    full = nn.Sequential(*modules(stages))
    inputs, targets = batch()
    expected = loss(full(inputs), targets)
    expected.backward()

    def run(world: World) -> None:
        pipeline = Pipeline.from_modules(modules(stages), schedule=schedule, microbatches=8)
        got = pipeline.step(inputs, targets, loss=loss)
        torch.testing.assert_close(got, expected.detach())
        for index, stage in pipeline.stages.items():
            for mine, other in zip(
                stage.module.parameters(), full[index].parameters(), strict=True
            ):
                torch.testing.assert_close(mine.grad, other.grad)
        torch.testing.assert_close(pipeline.predict(inputs[:3]), full(inputs[:3]).detach())

    World.mock(ranks).run(run)


def test_nccl_connects_stages_before_first_batched_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batched send and receive would wait for ranks whose schedule has no message yet."""
    done: list[tuple[str, int]] = []

    def spied(name: str) -> None:
        ours = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            done.append((name, dist.get_rank()))
            return ours(*args, **kwargs)

        monkeypatch.setattr(dist, name, call)

    inputs, targets = batch()

    def run(world: World) -> None:
        pipeline = Pipeline.from_modules(modules(2), schedule="1f1b", microbatches=4)
        pipeline.group.backend = Backend.NCCL
        for _ in range(2):
            pipeline.step(inputs, targets, loss=loss)

    spied("all_reduce")
    spied("batch_isend_irecv")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    World.mock(2).run(run)
    for rank in range(2):
        ours = [name for name, of_rank in done if of_rank == rank]
        assert ours[:2] == ["all_reduce", "batch_isend_irecv"]
        assert ours.count("all_reduce") == 1


def test_no_message_connects_a_rank_to_itself() -> None:
    """Up to torch 2.11, V-shaped schedules send to the same rank at the turn, an error of gloo."""

    def run(world: World) -> None:
        pipeline = Pipeline.from_modules(modules(4), schedule="zbv_zero_bubble", microbatches=4)
        pipeline.step(*batch(), loss=loss)
        (schedule,) = pipeline._runs.values()
        connecting = [
            op for stage in schedule._stages for op in stage._get_init_p2p_neighbors_ops()
        ]
        assert {op.group_peer for op in connecting} == {1 - world.rank}

    World.mock(2).run(run)


def test_pipeline_stage_without_single_tensor_output_is_error() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    def run(world: World) -> None:
        pipeline = Pipeline.from_modules([Two(), *modules(1)], microbatches=2)
        pipeline.step(*batch(), loss=loss)

    with pytest.raises(RankFailedError, match="returned tuple, but stages must return a tensor"):
        World.mock(2).run(run)


def test_pipeline_runs_on_subgroup() -> None:
    def run(world: World) -> tuple[float, int]:
        mesh = world.mesh(pp=2, dp_replicate=2)
        inputs, targets = batch()
        share = slice(8 * mesh.coordinate("dp_replicate"), 8 * mesh.coordinate("dp_replicate") + 8)
        pipeline = Pipeline.from_modules(modules(2), group=mesh.group("pp"))
        total = pipeline.step(inputs[share], targets[share], loss=loss)
        return float(comm.all_reduce_sum(total, group=mesh.group("dp_replicate"))), len(
            list(pipeline.parameters())
        )

    inputs, targets = batch()
    expected = float(loss(nn.Sequential(*modules(2))(inputs), targets).detach())
    for total, num_parameters in World.mock(4).run(run):
        assert total == pytest.approx(expected, rel=1e-6)
        assert num_parameters == 2


def test_pipeline_accepts_changing_batch_sizes() -> None:
    inputs, targets = batch()

    def run(world: World) -> list[float]:
        pipeline = Pipeline.from_modules(modules(2), microbatches=2)
        totals = [pipeline.step(inputs[:n], targets[:n], loss=loss) for n in (8, 4, 8)]
        return [float(total) for total in totals]

    model = nn.Sequential(*modules(2))
    expected = [float(loss(model(inputs[:n]), targets[:n]).detach()) for n in (8, 4, 8)]
    for totals in World.mock(2).run(run):
        assert totals == pytest.approx(expected, rel=1e-6)


def test_batchnorm_statistics_update_once_per_micro_batch() -> None:
    def run(world: World) -> int:
        stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)]
        pipeline = Pipeline.from_modules(stages, microbatches=4)
        pipeline.step(*batch(), loss=loss)
        return int(stages[world.rank][1].num_batches_tracked)

    assert World.mock(2).run(run) == [4, 4]


def test_pipeline_memory_stats_report_bytes_per_stage() -> None:
    def run(world: World) -> tuple[int, ...]:
        pipeline = Pipeline.from_modules(modules(4), microbatches=8)
        return pipeline.memory_stats().live_activations

    assert World.mock(4).run(run)[0] == (4, 3, 2, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pipeline.from_modules(modules(3)), "3 modules cannot be split among 2 ranks"),
        (lambda: Pipeline.from_modules(modules(2), schedule="1f2b"), "schedule=1f2b"),
        (lambda: Pipeline.from_modules(modules(2), microbatches=1), "microbatches=1"),
        (
            lambda: Pipeline(
                {0: modules(1)[0]}, schedule=PipelineSchedule("1f1b", degree=4, microbatches=4)
            ),
            "the group has 2 ranks",
        ),
        (
            lambda: Pipeline(
                {5: modules(1)[0]}, schedule=PipelineSchedule("1f1b", degree=2, microbatches=4)
            ),
            r"puts stages \[0\] on rank 0",
        ),
        (
            lambda: Pipeline.from_modules(modules(2), microbatches=4).step(
                torch.ones(6, WIDTH), torch.ones(6, WIDTH), loss=loss
            ),
            "use a multiple of 4",
        ),
    ],
)
def test_invalid_pipeline_is_refused(make: object, message: str) -> None:
    with pytest.raises(RankFailedError, match=message) as error:
        World.mock(2).run(lambda world: make())  # type: ignore[operator]
    assert isinstance(error.value.__cause__, ValueError)


class Faulty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise KeyError("the fault of a stage")
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "zbv_zero_bubble"])
def test_exception_in_stage_reaches_caller(schedule: str) -> None:
    stages = 2 * SCHEDULES[schedule].stages_per_rank

    def run(world: World) -> None:
        of_stages = [*modules(stages - 1), Faulty()]
        Pipeline.from_modules(of_stages, schedule=schedule).step(*batch(), loss=loss)

    with pytest.raises(RankFailedError, match="KeyError: 'the fault of a stage'"):
        World.mock(2).run(run)
