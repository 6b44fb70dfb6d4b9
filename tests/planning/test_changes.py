"""What makes a run fit: the cheapest changes first, each one that fits, by a made-up estimator."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from configured import estimate_config

from axonlaunch.config import ConfigError, Problem, RunConfig
from axonlaunch.config.layout import layout
from axonlaunch.planning.changes import levers, remedies
from axonlaunch.planning.record import Estimate, RankEstimate

HEADS = ["model.num_attention_heads=8", "data.sequence_length=64"]
STATES = 1000
SAMPLE = 100


@cache
def run(*overrides: str) -> RunConfig:
    words = ["launch.nproc=8", "train.global_batch_size=64", *overrides]
    return estimate_config(words)


def estimate(chosen: RunConfig) -> Estimate:
    """A machine simple enough to know the answer: states and samples, states divided by degrees."""
    assert chosen.launch.nproc != "auto"
    shares = layout(chosen, world_size=chosen.launch.nproc)
    parts = shares.tensor * shares.pipeline
    states = STATES // parts // (shares.dp_shard if shares.data_parallel == "fsdp" else 1)
    kept = {"none": 1.0, "selective": 0.5, "full": 0.25}[chosen.train.activation_checkpointing]
    activations = int(shares.micro_batch_size * SAMPLE * kept)
    breakdown: Any = dict.fromkeys(("gradients", "optimizer", "communication", "temporary"), 0) | {
        "parameters": states,
        "activations": activations,
    }
    peak = states + activations
    return Estimate(
        8, shares.axes, 1, peak, peak, peak, None, [RankEstimate(0, {"pp": 0}, peak, 0, breakdown)]
    )


def formula(chosen: RunConfig) -> float:
    """Formulas that say a tenth too much."""
    return 1.1 * estimate(chosen).process_bytes


def told(chosen: RunConfig, memory: int) -> list[list[str]]:
    found = remedies(chosen, estimate(chosen), memory=memory, formula=formula, estimate=estimate)
    assert all(one.process_bytes <= memory and one.costs for one in found)
    return [one.overrides for one in found]


def test_the_cheapest_that_fit_are_told_by_the_least_of_each() -> None:
    chosen = run("strategy=fsdp")  # 125 of states, 800 of activations
    assert told(chosen, 600) == [
        ["train.micro_batch_size=4"],
        ["train.activation_checkpointing=selective"],
    ]
    assert told(chosen, 400)[:2] == [
        ["train.micro_batch_size=2"],
        ["train.activation_checkpointing=full"],
    ]


def test_what_a_change_leaves_alone_is_not_traced_in_vain() -> None:
    """Replicas' states are too large here: no smaller micro-batch helps, and none is tried."""
    chosen = run("strategy=ddp")
    tried: list[RunConfig] = []

    def counting(one: RunConfig) -> Estimate:
        tried.append(one)
        return estimate(one)

    remedies(chosen, estimate(chosen), memory=800, formula=formula, estimate=counting)
    assert tried
    for one in tried:
        strategy = one.strategy
        assert (
            strategy.data_parallel == "fsdp"
            or strategy.tensor.degree * strategy.pipeline.degree > 1
        )


def test_where_no_one_change_is_enough_several_are_told() -> None:
    found = told(run("strategy=ddp"), 300)  # 1000 of states, 800 of activations
    assert found[0] == [
        "train.micro_batch_size=1",
        "strategy.data_parallel=fsdp",
        "strategy.fsdp.sharding=shard_grad_op",
    ]
    assert len(found) <= 3


def test_replicas_are_sharded_before_anything_of_them_goes_to_the_host() -> None:
    offloading = levers(run("strategy=ddp"))[-1]
    assert [option.settings["strategy.fsdp.cpu_offload"] for option in offloading] == [
        "params",
        "optimizer_states",
        "full",
    ]
    assert all(option.settings["strategy.data_parallel"] == "fsdp" for option in offloading)
    assert levers(run("strategy=tensor", "strategy.tensor.degree=8", *HEADS))[-1] == []


def test_what_tensor_parallelism_leaves_whole_is_divided_by_the_sequence() -> None:
    [*_, tensor, _, _] = levers(run("strategy=fsdp", *HEADS))
    assert tensor[0].settings == {
        "strategy.tensor.degree": 2,
        "strategy.tensor.sequence_parallel": True,
        "train.micro_batch_size": 8,
    }


def test_where_nothing_is_enough_nothing_is_told() -> None:
    assert told(run("strategy=ddp"), 1) == []


def test_what_can_not_be_run_is_passed_over() -> None:
    chosen = run("strategy=fsdp")

    def picky(one: RunConfig) -> Estimate:
        if one.train.activation_checkpointing != "none" or one.strategy.tensor.degree > 1:
            raise ConfigError([Problem("model", "no")])
        return estimate(one)

    found = remedies(chosen, estimate(chosen), memory=600, formula=formula, estimate=picky)
    assert [one.overrides for one in found] == [["train.micro_batch_size=4"]]


def test_traffic_is_told_as_the_engine_causes_it() -> None:
    """Shards are summed in every micro-batch, replicas once a step."""
    chosen = run("strategy=ddp", "train.micro_batch_size=2")
    costs = [
        cost for lever in levers(chosen) for option in lever if "replicas" in (cost := option.cost)
    ]
    assert [cost.partition(": ")[2] for cost in costs] == [
        f"{times} times replicas' traffic" for times in ("1.5", "4", "6")
    ]


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["strategy=zero1"], "shard_grad_op"),
        (["strategy=zero2"], "full_shard"),
        (["strategy=fsdp"], None),
    ],
)
def test_sharding_goes_on_from_where_it_is(words: list[str], first: str | None) -> None:
    kinds = [
        option.settings["strategy.fsdp.sharding"]
        for lever in levers(run(*words))
        for option in lever
        if "strategy.fsdp.sharding" in option.settings
    ]
    assert (kinds or [None])[0] == first
