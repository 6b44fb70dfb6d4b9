"""Random layouts: those accepted by preflight train as one process, others are errors."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, seed, settings, strategies as st
from support.configured import run_config
from support.parity import assert_trains_as_one_process
from support.parity_table import MODELS, SCHEDULES, WITH_EXPERTS

from axonlaunch.config import ConfigError, ConfigIssue

MOST_RANKS = 8
KINDS = {
    "": [],
    "ddp": ["strategy.data_parallel=ddp"],
    "zero1": ["strategy.data_parallel=zero1"],
    "fsdp": ["strategy.data_parallel=fsdp"],
    "hsdp": ["strategy=hsdp", "strategy.fsdp.replicate=2"],
}
RECOMPUTATION = ["none", "none", "full", "selective", "offload"]
OF_ONE_KIND = [
    "strategy.ddp.sync=no_sync",
    "strategy.ddp.sync=synchronous",
    "strategy.fsdp.cpu_offload=full",
    "strategy.fsdp.sharding=no_shard",
    "strategy.fsdp.replicate=2",
]
"""Settings that have no effect, and are refused, for another kind of data-parallel ranks."""


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, str, list[str], list[str]]:
    """Draw ``(ranks, model, overrides of model and batch, overrides of the layout)``."""
    model = draw(st.sampled_from(list(MODELS)))
    layers, batch = draw(st.integers(1, 9)), draw(st.sampled_from([4, 6, 8, 12, 16]))
    pipeline, tensor = (
        draw(st.sampled_from([1, 1, 2, 2, 3, 4])),
        draw(st.sampled_from([1, 2, 3, 4])),
    )
    context = draw(st.sampled_from([1, 1, 1, 2, 3]))
    data = draw(st.integers(1, 4))
    ranks = min(MOST_RANKS, pipeline * context * tensor * data)
    ranks += draw(st.sampled_from([0] * 9 + [1]))
    chosen = [
        *KINDS[draw(st.sampled_from(list(KINDS)))],
        f"strategy.pipeline.degree={pipeline}",
        f"strategy.tensor.degree={tensor}",
        f"strategy.context.degree={context}",
        f"train.activation_checkpointing={draw(st.sampled_from(RECOMPUTATION))}",
    ]
    if model in WITH_EXPERTS:
        chosen.append(f"strategy.expert.degree={draw(st.sampled_from([1, 2, 2, 3, 4]))}")
    if draw(st.sampled_from([False, False, True])):
        chosen.append(draw(st.sampled_from(OF_ONE_KIND)))
    if pipeline > 1:
        chosen.append(f"strategy.pipeline.schedule={draw(st.sampled_from(list(SCHEDULES)))}")
        each = draw(st.sampled_from(["auto", "auto", "1", "2", "3"]))
        rounds = draw(st.sampled_from(["auto", "auto", "2", "4"]))
        chosen.append(f"strategy.pipeline.stages_per_rank={each}")
        chosen.append(f"strategy.pipeline.microbatches={rounds}")
    if draw(st.booleans()):
        chosen.append(f"train.micro_batch_size={draw(st.sampled_from([1, 2, 3]))}")
    if tensor > 1 and draw(st.booleans()):
        chosen.append("strategy.tensor.sequence_parallel=true")
    common = [f"model.num_hidden_layers={layers}", f"train.global_batch_size={batch}"]
    return ranks, model, common, chosen


def problems_of(overrides: list[str], ranks: int) -> list[ConfigIssue]:
    """Return the problems for which ``axonlaunch train`` would refuse before any rank starts."""
    try:
        run_config([f"launch.nproc={ranks}", "launch.backend=mock", *overrides])
    except ConfigError as error:
        return error.problems
    return []


def check(run: tuple[int, str, list[str], list[str]]) -> bool:
    """Return whether a run is accepted; fail if it then differs, or was refused without a
    reason.
    """
    ranks, model, common, chosen = run
    problems = problems_of([*MODELS[model], *common, *chosen], ranks)
    if problems:
        assert all(problem.key and problem.message for problem in problems)
        return False
    assert_trains_as_one_process([*MODELS[model], *common, *chosen], ranks)
    return True


@pytest.mark.parametrize(
    ("number", "examples"), [(0, 5), pytest.param(1, 60, marks=pytest.mark.slow)]
)
def test_a_layout_trains_as_one_process_or_is_refused(number: int, examples: int) -> None:
    passed: Counter[bool] = Counter()

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(runs())
    def draw(run: tuple[int, str, list[str], list[str]]) -> None:
        passed[check(run)] += 1

    draw()
    assert passed[True] >= examples // 10
    assert passed[False] >= examples // 10
