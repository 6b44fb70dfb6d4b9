"""Changes that make a run fit: the cheapest first, each sufficient, with a simulated estimator."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
from support.configured import estimate_config

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.options.hardware import GIB
from axonlaunch.planning.records import Estimate, RankEstimate
from axonlaunch.planning.search.remedies import TRACED, candidate_changes, search_changes

HEADS = ["model.num_attention_heads=8", "data.sequence_length=64"]
STATES = 1000
SAMPLE = 100


@cache
def run(*overrides: str) -> RunConfig:
    arguments = ["launch.nproc=8", "train.global_batch_size=64", *overrides]
    return estimate_config(arguments)


def estimate(chosen: RunConfig) -> Estimate:
    """A simple machine with known memory: states and samples, with states divided by degrees."""
    assert chosen.launch.nproc != "auto"
    layout = Layout.of(chosen, world_size=chosen.launch.nproc)
    model_parallel = layout.tensor * layout.pipeline
    states = STATES // model_parallel // (layout.dp_shard if layout.data_parallel == "fsdp" else 1)
    remaining = {"none": 1.0, "selective": 0.5, "full": 0.25}[chosen.train.recomputation]
    activations = int(layout.micro_batch_size * SAMPLE * remaining)
    breakdown: Any = dict.fromkeys(("gradients", "optimizer", "communication", "temporary"), 0) | {
        "parameters": states,
        "activations": activations,
    }
    peak = states + activations
    return Estimate(
        8, layout.axes, 1, peak, peak, peak, [RankEstimate(0, {"pp": 0}, peak, 0, breakdown)]
    )


def formula(chosen: RunConfig) -> float:
    """Formulas that are a tenth too high."""
    return 1.1 * estimate(chosen).process_bytes


def reported(chosen: RunConfig, memory: int) -> list[list[str]]:
    changes = [
        *search_changes(chosen, estimate(chosen), memory=memory, formula=formula, estimate=estimate)
    ]
    assert all(change.process_bytes <= memory and change.costs for change in changes)
    return [change.overrides for change in changes]


def test_cheapest_fitting_changes_are_reported() -> None:
    chosen = run("strategy=fsdp")  # 125 of states, 800 of activations
    assert reported(chosen, 600) == [
        ["train.micro_batch_size=4"],
        ["train.activation_checkpointing=selective"],
    ]
    assert reported(chosen, 400)[:2] == [
        ["train.micro_batch_size=2"],
        ["train.activation_checkpointing=full"],
    ]


def test_ineffective_changes_are_not_traced() -> None:
    """Replicas' states are too large here, so no smaller micro-batch helps or is tried."""
    chosen = run("strategy=ddp")
    tried: list[RunConfig] = []

    def counting(changed: RunConfig) -> Estimate:
        tried.append(changed)
        return estimate(changed)

    [*search_changes(chosen, estimate(chosen), memory=800, formula=formula, estimate=counting)]
    assert tried
    for changed in tried:
        strategy = changed.strategy
        assert (
            strategy.data_parallel == "fsdp"
            or strategy.tensor.degree * strategy.pipeline.degree > 1
        )


def test_several_changes_are_reported_if_one_is_not_enough() -> None:
    changes = reported(run("strategy=ddp"), 300)  # 1000 of states, 800 of activations
    assert changes[0] == [
        "train.micro_batch_size=1",
        "strategy.data_parallel=fsdp",
        "strategy.fsdp.sharding=shard_grad_op",
    ]
    assert len(changes) <= 3


@pytest.mark.parametrize(
    ("current", "offered"),
    [
        ("none", ["selective", "selective_offload", "full", "offload"]),
        ("selective_offload", ["full", "offload"]),
        ("offload", []),
    ],
)
def test_offloaded_inputs_are_offered_after_recomputation_and_only_on_gpus(
    current: str, offered: list[str]
) -> None:
    key = "train.activation_checkpointing"
    by_hardware = {
        hardware: [
            option.settings[key]
            for options in candidate_changes(run(f"hardware={hardware}", f"{key}={current}"))
            for option in options
            if key in option.settings
        ]
        for hardware in ("h100_80gb", "cpu")
    }
    on_cpu = [mode for mode in offered if not mode.endswith("offload")]
    assert by_hardware == {"h100_80gb": offered, "cpu": on_cpu}


def test_sharding_is_tried_before_offload() -> None:
    *_, offloading, _, _, _, _ = candidate_changes(run("strategy=ddp"))
    assert [option.settings["strategy.fsdp.cpu_offload"] for option in offloading] == [
        "params",
        "optimizer_states",
        "full",
    ]
    assert all(option.settings["strategy.data_parallel"] == "fsdp" for option in offloading)
    *_, alone, _, _, _, _ = candidate_changes(
        run("strategy=tensor", "strategy.tensor.degree=8", *HEADS)
    )
    assert [option.settings for option in alone] == [option.settings for option in offloading]
    assert "sharded" in offloading[0].cost
    assert "sharded" not in alone[0].cost


def test_lower_precision_of_states_and_masters_is_tried_last() -> None:
    *_, masters, states = candidate_changes(run("strategy=zero1", "train.precision=bf16"))
    assert [option.settings for option in masters] == [
        {"train.param_dtype": "bf16", "optimizer.master_weights": "fp32"}
    ]
    assert [option.settings for option in states] == [
        {"optimizer.state_dtype": "bf16"},
        {"optimizer.state_dtype": "8bit"},
    ]
    for other in ("optimizer=muon", "adapter=lora", "optimizer.state_dtype=8bit"):
        *_, masters, states = candidate_changes(run("strategy=fsdp", other))
        assert masters == states == []


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        (
            ["strategy=fsdp"],
            {"train.optimizer_in_backward": True, "train.grad_clip": None},
        ),
        (["strategy=fsdp", "train.grad_clip=null"], {"train.optimizer_in_backward": True}),
        (["strategy=fsdp", "train.micro_batch_size=4"], None),
        (["strategy=ddp"], None),
        (["strategy=fsdp", "optimizer=muon"], None),
    ],
)
def test_update_in_backward_is_offered_where_gradients_are_freed_in_it(
    overrides: list[str], settings: dict[str, Any] | None
) -> None:
    *_, options, _, _, _ = candidate_changes(run(*overrides))
    assert [option.settings for option in options] == ([] if settings is None else [settings])
    if "train.grad_clip=null" not in overrides:
        assert all("gradients are not clipped" in option.cost for option in options)


def test_sequence_parallelism_is_reported_for_tensor_ranks() -> None:
    [*_, tensor, _, _, _, _, _, _] = candidate_changes(run("strategy=fsdp", *HEADS))
    assert tensor[0].settings == {
        "strategy.tensor.degree": 2,
        "strategy.tensor.sequence_parallel": True,
        "train.micro_batch_size": 8,
    }


def test_no_remedies_are_reported_if_no_layout_fits() -> None:
    assert reported(run("strategy=ddp"), 1) == []


def test_invalid_changes_are_skipped() -> None:
    chosen = run("strategy=fsdp")

    def picky(changed: RunConfig) -> Estimate:
        if changed.train.activation_checkpointing != "none" or changed.strategy.tensor.degree > 1:
            raise ConfigError([ConfigIssue("model", "no")])
        return estimate(changed)

    offers = [
        *search_changes(chosen, estimate(chosen), memory=600, formula=formula, estimate=picky)
    ]
    assert [offer.overrides for offer in offers] == [["train.micro_batch_size=4"]]


def test_traffic_is_reported_as_the_engine_causes_it() -> None:
    """Shards are reduced in every micro-batch, replicas once per step."""
    chosen = run("strategy=ddp", "train.micro_batch_size=2")
    costs = [
        cost
        for change in candidate_changes(chosen)
        for option in change
        if "replicas" in (cost := option.cost)
    ]
    assert [cost.partition(": ")[2] for cost in costs] == [
        "as much traffic as replicas",
        "4 times replicas' traffic",
        "6 times replicas' traffic",
    ]


@pytest.mark.parametrize(
    ("overrides", "first"),
    [
        (["strategy=zero1"], "shard_grad_op"),
        (["strategy=zero2"], "full_shard"),
        (["strategy=fsdp"], None),
    ],
)
def test_sharding_continues_from_where_it_is(overrides: list[str], first: str | None) -> None:
    kinds = [
        option.settings["strategy.fsdp.sharding"]
        for change in candidate_changes(run(*overrides))
        for option in change
        if "strategy.fsdp.sharding" in option.settings
    ]
    assert (kinds or [None])[0] == first


def searched(chosen: RunConfig, **options: Any) -> tuple[list[list[str]], list[str]]:
    """Return the changes, and the untried ones."""
    search = search_changes(chosen, estimate(chosen), memory=600, formula=formula, **options)
    changes: list[list[str]] = []
    while True:
        try:
            changes.append(next(search).overrides)
        except StopIteration as end:
            return changes, end.value


def test_changes_come_one_by_one_until_the_time_is_over() -> None:
    chosen, tried = run("strategy=fsdp"), list[RunConfig]()

    def counting(changed: RunConfig) -> Estimate:
        tried.append(changed)
        return estimate(changed)

    search = search_changes(
        chosen, estimate(chosen), memory=600, formula=formula, estimate=counting
    )
    assert [next(search).overrides] == reported(chosen, 600)[:1]
    assert len(tried) == 1
    changes, untried = searched(chosen, estimate=counting, is_over=lambda: True)
    assert (changes, len(untried)) == ([], TRACED)
    assert untried[0] == " ".join(reported(chosen, 600)[0])
    assert len(tried) == 1


def test_changes_fitting_by_formula_are_tried_first() -> None:
    chosen, tried = run("strategy=fsdp"), list[int]()

    def too_high(changed: RunConfig) -> float:
        return estimate(changed).process_bytes * (
            1.7 if changed.train.micro_batch_size == 4 else 1.0
        )

    def noting(changed: RunConfig) -> Estimate:
        tried.append(Layout.of(changed, world_size=8).micro_batch_size)
        return estimate(changed)

    [*search_changes(chosen, estimate(chosen), memory=800, formula=too_high, estimate=noting)]
    assert tried[0] == 2


def test_a_change_whose_estimate_runs_out_of_time_counts_as_untried() -> None:
    def slow(changed: RunConfig) -> Estimate:
        raise TimeoutError

    changes, untried = searched(run("strategy=fsdp"), estimate=slow)
    assert (changes, len(untried)) == ([], TRACED)


@pytest.mark.parametrize(("node_gib", "fits"), [(None, None), (1, False), (64, True)])
def test_offload_is_reported_per_rank_and_node_and_needs_host_memory(
    node_gib: int | None, fits: bool | None
) -> None:
    overrides = ["hardware=h100_80gb", f"hardware.host_memory_gib={node_gib or 'null'}"]
    overrides += ["train.micro_batch_size=1", "train.activation_checkpointing=full"]
    chosen = run("strategy=fsdp", *overrides)

    def offloading(changed: RunConfig) -> Estimate | None:
        if changed.strategy.fsdp.cpu_offload == "none":
            return None
        [rank] = estimate(changed).ranks
        return dataclasses.replace(
            estimate(changed), ranks=[dataclasses.replace(rank, host_bytes=GIB)], process_bytes=1
        )

    changes = [
        *search_changes(
            chosen, estimate(chosen), memory=1e9, formula=lambda _: 1.0, estimate=offloading
        )
    ]
    assert bool(changes) == (fits is not False)
    for change in changes:
        assert change.host_memory is not None
        assert (change.host_memory.bytes_per_rank, change.host_memory.bytes_per_node) == (
            GIB,
            8 * GIB,
        )
        assert change.host_memory.fits is fits


def test_no_offload_is_reported_on_cpu() -> None:
    *_, offloading, _, _, _, _ = candidate_changes(run("strategy=fsdp", "hardware=cpu"))
    assert offloading == []


def test_quantized_base_is_tried_after_changes_that_keep_numerics() -> None:
    *_, options, _, _ = candidate_changes(run("adapter=lora"))
    assert [option.settings for option in options] == [
        {"adapter.base": "int8"},
        {"adapter.base": "nf4"},
    ]
    *_, options, _, _ = candidate_changes(run("adapter=lora", "train.precision=bf16"))
    assert options[0].settings == {"train.param_dtype": "bf16"}
    *_, options, _, _ = candidate_changes(run("adapter=lora", "adapter.base=int8"))
    assert [option.settings for option in options] == [{"adapter.base": "nf4"}]
    assert candidate_changes(run())[-3] == []
