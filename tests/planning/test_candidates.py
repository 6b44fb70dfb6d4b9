"""The layouts that a search looks at."""

from __future__ import annotations

from typing import Any

from axonlaunch import config
from axonlaunch.config.layout import Layout
from axonlaunch.config.rules import broken_world_rules, find_rule_violations
from axonlaunch.planning.search.candidates import SEARCHED, Candidate, candidates
from axonlaunch.planning.search.search import _overrides

TINY = [
    "model.hidden_size=32",
    "model.num_hidden_layers=4",
    "model.num_attention_heads=4",
    "data=synthetic_tokens",
    "data.sequence_length=16",
    "train.global_batch_size=16",
]


def listed(*overrides: str, devices: int = 8, **kept: Any) -> list[Candidate]:
    chosen = config.load([*TINY, *overrides])
    return [*candidates(chosen, devices=devices, in_node=4, fixed=kept)]


def test_each_fills_the_devices_and_breaks_no_rule() -> None:
    found = listed()
    assert len(found) > 100
    for one in found:
        axes = one.layout.axes
        assert axes["pp"] * axes["dp_replicate"] * axes["dp_shard"] * axes["cp"] * axes["tp"] == 8
        assert find_rule_violations(one.config) == []
        assert broken_world_rules(one.config, world_size=8) == []


def test_what_is_written_for_several_machines_is_the_layout_that_was_looked_at() -> None:
    given = config.load(TINY)
    for one in listed():
        overrides = _overrides(given, one, (2, 4))
        assert overrides[-2:] == ["launch.nnodes=2", "launch.nproc=4"]
        run = config.with_values(given, {**one.settings, "launch.nnodes": 2, "launch.nproc": 4})
        assert Layout.of(run, world_size=8) == one.layout


def test_no_two_are_the_same() -> None:
    found = [tuple(one.settings.items()) for one in listed()]
    assert len(found) == len(set(found))


def test_every_kind_of_sharding_schedule_and_recomputation_is_among_them() -> None:
    found = listed()
    kinds = {(one.layout.data_parallel, one.config.strategy.fsdp.sharding) for one in found}
    assert {"ddp", "zero1", "none"} <= {kind for kind, _ in kinds}
    assert {s for kind, s in kinds if kind == "fsdp"} == {
        "full_shard",
        "shard_grad_op",
        "hybrid_shard",
    }
    assert {one.layout.schedule for one in found} >= {"1f1b", "interleaved_1f1b"}
    modes = {one.config.train.activation_checkpointing for one in found}
    assert modes == {"none", "selective", "full"}


def test_shards_are_offloaded_where_there_is_a_host_to_take_them() -> None:
    chosen = config.load(TINY)
    found = [*candidates(chosen, devices=2, in_node=2, fixed={}, offloads=True)]
    offloads = {(one.layout.data_parallel, one.offload) for one in found}
    assert {kind for kind, offload in offloads if offload != "none"} == {"fsdp"}
    assert {offload for _, offload in offloads} == {"none", "optimizer_states", "params"}
    assert {one.offload for one in listed()} == {"none"}
    for one in found:
        assert find_rule_violations(one.config) == []


def test_tensor_parallelism_stays_in_a_node_and_divides_the_heads() -> None:
    assert {one.layout.tensor for one in listed()} == {1, 2, 4}
    assert {one.layout.tensor for one in listed("model.num_attention_heads=2")} == {1, 2}


def test_context_is_for_long_sequences_and_few_samples() -> None:
    assert {one.layout.context for one in listed()} == {1}
    long = listed("data.sequence_length=65536", "model.max_position_embeddings=65536")
    assert {one.layout.context for one in long} == {1, 2, 4}
    few = listed("train.global_batch_size=2", "model.num_attention_heads=1", "strategy=single")
    assert {(one.layout.data_ranks, one.layout.context) for one in few} == {(2, 4), (1, 4)}
    assert {one.layout.context for one in listed(**{"strategy.context.degree": 2})} == {2}


def test_what_the_user_has_set_stays() -> None:
    key = "strategy.tensor.degree"
    assert key in SEARCHED
    found = listed(**{key: 2})
    assert found
    assert {one.layout.tensor for one in found} == {2}


def test_a_batch_that_nothing_divides_leaves_none() -> None:
    assert listed("train.global_batch_size=1", "model.num_attention_heads=1", devices=7) == []


def test_an_optimizer_that_exchanges_parts_is_offered_no_offload() -> None:
    chosen = config.load([*TINY, "optimizer=muon"])
    found = [*candidates(chosen, devices=2, in_node=2, fixed={}, offloads=True)]
    assert {one.offload for one in found} == {"none"}
    assert "fsdp" in {one.layout.data_parallel for one in found}
