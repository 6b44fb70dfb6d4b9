"""An optimizer's states have the right size in every estimate before a run."""

from __future__ import annotations

import pytest
from support.configured import estimate_config, run_config
from support.rank_engine import rank_engine

from axonlaunch import config
from axonlaunch.comm import World
from axonlaunch.comm.mesh import local_part
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import resolved
from axonlaunch.planning.memory import estimate as memory_estimate, states_only
from axonlaunch.preflight import checks

pytestmark = pytest.mark.processes

NO_MOMENTUM = ["optimizer=sgd", "optimizer.momentum=0"]


def chosen(*overrides: str) -> RunConfig:
    return resolved(config.load(overrides), accelerators=0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "zero1", "fsdp"])
def test_sgd_without_momentum_has_no_state_bytes_in_an_estimate(strategy: str) -> None:
    overrides = ["model.hidden_size=16", "model.num_attention_heads=2", "data=synthetic_tokens"]
    overrides += ["data.sequence_length=8", "hardware=cpu"]
    run = chosen(*overrides, f"strategy={strategy}", *NO_MOMENTUM)
    for estimate in (memory_estimate.estimate(run), states_only.estimate_states(run)):
        assert [rank.breakdown["optimizer"] for rank in estimate.ranks] == [0] * len(estimate.ranks)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("optimizer", "strategy", "ranks"),
    [
        ("nadam", "strategy=zero1", 2),
        ("lion", "strategy=pipeline", 2),
        ("adafactor", "strategy=fsdp strategy.tensor.degree=2", 4),
        ("adafactor", "strategy=pipeline", 2),
        ("muon", "strategy=zero1", 2),
        ("muon", "strategy=pipeline", 2),
        ("muon", "strategy=fsdp optimizer.groups={*.bias:{algorithm:adamw},layers.1.*:{lr:0}}", 2),
        ("sgd", "strategy=fsdp optimizer.groups={layers.1.*:{momentum:0}}", 2),
    ],
)
def test_an_estimate_has_the_bytes_that_a_run_holds(
    optimizer: str, strategy: str, ranks: int
) -> None:
    overrides = [
        *("model.hidden_size=16", "model.num_hidden_layers=2", "model.num_attention_heads=2"),
        *("data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=8"),
        *(f"optimizer={optimizer}", *strategy.split(), f"launch.nproc={ranks}"),
        "hardware=cpu",  # skips the estimate of the allocator's cache, which needs another trace
    ]
    run = run_config(overrides)

    def held(world: World) -> int:
        engine, _ = rank_engine(run, world)
        return sum(local_part(state).nbytes for state in engine.optimizer_states())

    by_rank = World.mock(ranks).run(held)
    for rank in memory_estimate.estimate(estimate_config(overrides)).ranks:
        assert rank.breakdown["optimizer"] == by_rank[rank.rank]


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"),
    [
        (["optimizer=adamw"], 16),
        (["optimizer=sgd"], 12),
        (NO_MOMENTUM, 8),
        (["train.optimizer_in_backward=true", "train.grad_clip=null"], 12),
    ],
)
def test_out_of_memory_refusal_counts_gradients_and_optimizer_states(
    optimizer: list[str], bytes_each: int
) -> None:
    run = chosen("model=llama3_8b", "strategy=single", "hardware=a100_40gb", *optimizer)
    [problem] = [issue for issue in checks.find_issues(run, devices=0) if issue.key == "model"]
    assert f"take {8_030_261_248 * bytes_each / 2**30:.1f} GiB per rank" in problem.message
