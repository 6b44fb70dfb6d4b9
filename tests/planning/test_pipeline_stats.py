"""The engine statistics in an estimate equal those of real processes."""

from __future__ import annotations

import pytest
from support import live_storages
from support.configured import estimate_config
from support.live_storages import SMALL

from axonlaunch.config import RunConfig
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.memory.pipeline_stats import pipeline_stats
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun

pytestmark = pytest.mark.usefixtures("server")

SHARDED = [
    "strategy=fsdp",
    pytest.param("strategy=zero2", marks=pytest.mark.slow),
    "strategy=fsdp strategy.tensor.degree=2",
]
PIPELINES = [
    pytest.param("strategy=pipeline strategy.pipeline.schedule=gpipe", marks=pytest.mark.slow),
    pytest.param(
        "strategy=pipeline strategy.pipeline.schedule=1f1b model.num_hidden_layers=12",
        marks=pytest.mark.slow,
    ),
    "model.num_hidden_layers=4 strategy=pipeline strategy.pipeline.schedule=interleaved_1f1b "
    "strategy.data_parallel=fsdp",
]


def run(case: str, ranks: int) -> RunConfig:
    return estimate_config([*SMALL, f"launch.nproc={ranks}", "hardware=cpu", *case.split()])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("case", SHARDED)
def test_estimated_fsdp_stats_equal_engine_stats(case: str) -> None:
    ranks = 4 if "tensor" in case else 2
    [reported] = estimate(run(case, ranks)).ranks
    expected = reported.sharded_parameters
    assert expected is not None
    for stats, _ in live_storages.stats(tuple(case.split()), ranks=ranks):
        assert stats is not None
        assert stats.current_bytes == expected["current_bytes"]
        assert stats.peak_bytes == expected["peak_bytes"]
        assert stats.total_bytes == expected["total_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("case", PIPELINES)
def test_estimated_pipeline_activations_equal_storages(case: str) -> None:
    chosen = run(case, 2)
    reported = estimate(chosen)
    schedule = ReducedRun.of(chosen).schedule
    stats = pipeline_stats(reported, schedule)
    left: dict[int, int] = {}
    for _, of_rank in live_storages.stats(tuple(case.split()), ranks=2):
        left |= of_rank
    assert stats.activation_bytes == tuple(
        live * left[stage] for stage, live in enumerate(stats.live_activations)
    )
    assert min(left.values()) > 0
