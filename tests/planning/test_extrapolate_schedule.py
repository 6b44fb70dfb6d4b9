"""A short step in a short pipeline is enough to compute the memory of a long one."""

from __future__ import annotations

import pytest
from support.configured import estimate_config

from axonlaunch.engines.pipeline.schedule import Action
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.tracing.extrapolation import extrapolate_schedule
from axonlaunch.planning.tracing.extrapolation.extrapolate_depth import peak
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun
from axonlaunch.planning.tracing.storage_trace import TraceEvent

pytestmark = pytest.mark.processes

HIDDEN, LENGTH = 64, 32
LONG = [
    f"model.hidden_size={HIDDEN}",
    "model.num_attention_heads=4",
    "data=synthetic_tokens",
    f"data.sequence_length={LENGTH}",
    "train.micro_batch_size=1",
    "hardware=cpu",
    "strategy=pipeline",
]
ACTIVATION = HIDDEN * LENGTH * 4
SIX = "strategy.pipeline.degree=6 model.num_hidden_layers=12 launch.nproc=6"
DIVIDED = "strategy.pipeline.degree=6 model.num_hidden_layers=6 launch.nproc=12"


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        "strategy.pipeline.degree=5 model.num_hidden_layers=5 launch.nproc=5 "
        "train.global_batch_size=7",
        f"{DIVIDED} strategy.data_parallel=fsdp train.global_batch_size=14 "
        "train.precision=bf16 train.activation_checkpointing=full",
        "strategy.pipeline.degree=8 model.num_hidden_layers=8 launch.nproc=8 "
        "train.global_batch_size=16",
        f"{DIVIDED} strategy.tensor.degree=2 train.global_batch_size=6 train.precision=bf16",
        "strategy.pipeline.degree=4 model.num_hidden_layers=4 launch.nproc=4 "
        "train.global_batch_size=24 strategy.pipeline.microbatches=8",
        *(
            f"{SIX} train.global_batch_size=12 strategy.pipeline.schedule={schedule}"
            for schedule in (
                "gpipe",
                "interleaved_1f1b",
                "looped_bfs",
                "interleaved_zero_bubble",
                "zbv_zero_bubble",
                "dualpipev",
            )
        ),
    ],
)
def test_extrapolated_stage_memory_equals_long_schedule(overrides: str) -> None:
    chosen = estimate_config([*LONG, *overrides.split()])
    reduced = ReducedRun.of(chosen)
    short, _ = reduced.reduce(0)
    assert short.layout.micro_batches < reduced.layout.micro_batches
    reported, exact = estimate(chosen), estimate(chosen, exact=True)
    tolerance = ACTIVATION if "1f1b" in reduced.layout.schedule else 16
    for mine, other in zip(reported.ranks, exact.ranks, strict=True):
        assert abs(mine.peak_bytes - other.peak_bytes) <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_micro_batches_without_a_pipeline_add_their_samples_and_losses(strategy: str) -> None:
    overrides = [*LONG[:-1], f"strategy={strategy}", "launch.nproc=2", "train.global_batch_size=12"]
    chosen = estimate_config([*overrides, "model.num_hidden_layers=2"])
    assert ReducedRun.of(chosen).reduce(0)[0].layout.micro_batches == 3
    assert estimate(chosen) == estimate(chosen, exact=True)


def test_extrapolation_counts_activations_of_pending_backwards() -> None:
    step = [TraceEvent(("start",), [(5, 0)])]
    held_bytes = 5
    for action in ("F 0 0", "F 0 1", "F 0 2", "F 0 3", "B 0 0", "B 0 1", "B 0 2", "B 0 3"):
        step.append(TraceEvent((f"action {action}",), [(held_bytes, 0), (held_bytes + 12, 0)]))
        held_bytes += 10 if action[0] == "F" else -10
    step.append(TraceEvent(("update",), [(held_bytes, 0), (held_bytes + 1, 0)]))
    ahead = [Action("F", 0, n) for n in range(20)] + [Action("B", 0, n) for n in range(20)]
    long = extrapolate_schedule.extend_schedule(step, rounds=[ahead])
    assert peak(long) == ((5 + 20 * 10 + 12, 0), 0)
    assert long[-1].points == step[-1].points
