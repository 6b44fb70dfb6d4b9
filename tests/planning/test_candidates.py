"""The layouts that a search considers."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from support.hf_families import without_folder
from torch import nn

import axonlaunch as ax
from axonlaunch import config
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.consistency.rules import broken_world_rules, find_rule_violations
from axonlaunch.config.consistency.run_nodes import RunNodes
from axonlaunch.planning.search.candidates import OFFLOAD_GAIN, Candidate, _Pipelines, candidates
from axonlaunch.planning.search.keys import SEARCHED
from axonlaunch.planning.search.planned_layouts import _overrides
from axonlaunch.planning.search.preselection import preselect, with_memory
from axonlaunch.planning.search.rounds import _remaining

TINY = [
    "model.hidden_size=32",
    "model.num_hidden_layers=4",
    "model.num_attention_heads=4",
    "data=synthetic_tokens",
    "data.sequence_length=16",
    "train.global_batch_size=16",
]


def listed(*overrides: str, devices: int = 8, **fixed: Any) -> list[Candidate]:
    chosen = config.load([*TINY, *overrides])
    return [*candidates(chosen, devices=devices, in_node=4, fixed=fixed)]


class Stacked(nn.Module):
    """User-defined blocks with a tensor plan that supports sequence parallelism."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 256)


def test_candidates_use_all_devices_and_are_valid() -> None:
    choices = listed()
    assert len(choices) > 100
    for candidate in choices:
        axes = candidate.layout.axes
        assert axes["pp"] * axes["dp_replicate"] * axes["dp_shard"] * axes["cp"] * axes["tp"] == 8
        assert find_rule_violations(candidate.config) == []
        assert broken_world_rules(candidate.config, world_size=8) == []


def test_candidate_overrides_for_several_nodes_give_same_layout() -> None:
    chosen = config.load(TINY)
    for c in listed():
        overrides = _overrides(chosen, c, RunNodes(count=2, ranks=4))
        assert overrides[-2:] == ["launch.nnodes=2", "launch.nproc=4"]
        run = config.with_values(chosen, {**c.settings, "launch.nnodes": 2, "launch.nproc": 4})
        assert Layout.of(run, world_size=8) == c.layout


def test_candidates_are_unique() -> None:
    settings = [tuple(c.settings.items()) for c in listed()]
    assert len(settings) == len(set(settings))


def test_candidates_cover_sharding_schedules_and_recomputation() -> None:
    choices = listed()
    kinds = {(c.layout.data_parallel, c.config.strategy.fsdp.sharding) for c in choices}
    assert {"ddp", "zero1", "none"} <= {kind for kind, _ in kinds}
    assert {s for kind, s in kinds if kind == "fsdp"} == {
        "full_shard",
        "shard_grad_op",
        "hybrid_shard",
    }
    # Stages of a pipeline stay gathered with full_shard, too.
    staged = {c.config.strategy.fsdp.sharding for c in choices if c.layout.pipeline > 1}
    assert staged == {"full_shard", "hybrid_shard"}
    deep = {c.layout.schedule for c in listed("model.num_hidden_layers=16")}
    assert deep >= {"1f1b", "interleaved_1f1b", "zbv_zero_bubble"}
    modes = {c.config.train.activation_checkpointing for c in choices}
    assert modes == {"none", "selective", "full"}


def test_a_single_device_shards_only_to_offload() -> None:
    chosen = config.load(TINY)
    kinds = {
        offloads: {
            (c.layout.data_parallel, c.offload)
            for c in candidates(chosen, devices=1, in_node=1, fixed={}, offloads=offloads)
        }
        for offloads in (False, True)
    }
    assert kinds[False] == {("none", "none")}
    assert kinds[True] - kinds[False] == {("fsdp", "optimizer_states"), ("fsdp", "params")}


def test_candidates_have_more_stages_per_rank_only_if_they_are_faster() -> None:
    # 16 equal blocks on 4 ranks: with 1, 2, 3 and 4 stages a step of m micro-batches takes
    # (m + 3) 4, (2 m + 3) 2, (3 m + 3) 2 and (4 m + 3) 1 passes through a block.
    pipelines = _Pipelines(16, 0.0, {})
    allowed = {
        m: [n for n in (2, 3, 4) if pipelines.allow("interleaved_1f1b", n, 4, m)] for m in (4, 256)
    }
    assert allowed == {4: [2, 4], 256: []}  # 28, 22, 30 and 19; 1036, 1030, 1542 and 1027
    # 8 blocks: (4 + 3) 2 and (2 * 4 + 3) 1. A head like 2 blocks makes the longest stage 3 in both.
    assert _Pipelines(8, 0.0, {}).allow("interleaved_1f1b", "auto", 4, 4)
    assert not _Pipelines(8, 2.0, {}).allow("interleaved_1f1b", "auto", 4, 4)
    assert not _Pipelines(8, 0.0, {}).allow("interleaved_1f1b", 3, 4, 4)  # fewer blocks than stages
    asked = {"strategy.pipeline.stages_per_rank": 3}
    assert _Pipelines(16, 0.0, asked).allow("interleaved_1f1b", 3, 4, 256)


def test_candidates_with_more_stages_per_rank_are_valid() -> None:
    choices = listed("model.num_hidden_layers=16")
    stages = {(c.layout.schedule, c.layout.stages_per_rank) for c in choices}
    assert {n for schedule, n in stages if schedule == "interleaved_1f1b"} == {2, 3}
    for c in choices:
        assert c.layout.num_stages <= 16
        assert find_rule_violations(c.config) == []


LONG = ["data.sequence_length=2048", "model.max_position_embeddings=2048", "model.vocab_size=4096"]


def test_candidates_can_divide_the_loss() -> None:
    for c in listed(*LONG):
        tokens = 2048 * c.layout.micro_batch_size
        is_split = c.layout.schedule == "zbv_zero_bubble"  # both halves would recompute
        assert c.logits_bytes == (0 if is_split else 16 * tokens * 4096 / c.layout.tensor)
        chunked = c.with_chunks()
        assert chunked.settings["train.loss_chunk"] == 1024
        assert chunked.family == c.family
        assert chunked.config.train.loss_chunk == 1024
        assert find_rule_violations(chunked.config) == []
    assert not any(c.logits_bytes for c in listed(*LONG, "train.loss_chunk=512"))
    assert not any(c.logits_bytes for c in listed(*LONG, **{"train.loss_chunk": None}))
    assert not any(c.logits_bytes for c in listed())  # a sample has 16 tokens


def test_loss_is_divided_only_if_all_logits_do_not_fit() -> None:
    formulas: Any = SimpleNamespace(
        process_bytes=lambda run, layout: 4.0 if run.train.loss_chunk else 10.0
    )
    large = dataclasses.replace(listed(*LONG)[0], logits_bytes=7.0)
    for memory, is_divided in ((10.0, False), (9.0, True), (4.0, True), (3.0, False), (2.0, False)):
        chosen, size = with_memory(large, formulas, memory=memory)
        assert (chosen.settings["train.loss_chunk"] is not None) == is_divided
        assert size == (4.0 if is_divided else 10.0)
    hardware: Any = None  # nothing is timed
    [smallest] = preselect([large], formulas={(): formulas}, hardware=hardware, memory=0.0)
    assert (smallest.candidate.settings["train.loss_chunk"], smallest.bytes) == (1024, 4.0)


def test_estimated_layout_is_tried_again_only_with_its_loss_in_chunks() -> None:
    large = dataclasses.replace(listed(*LONG)[0], logits_bytes=7.0)
    small = dataclasses.replace(large, logits_bytes=0.0)
    chunked = large.with_chunks()
    assert [*_remaining([large], [])] == [large]
    assert [*_remaining([large], [large.settings])] == [chunked]
    assert [*_remaining([large, chunked], [chunked.settings])] == []
    assert [*_remaining([small], [small.settings])] == []


def test_candidates_offload_only_with_host_memory() -> None:
    chosen = config.load(TINY)
    choices = [*candidates(chosen, devices=2, in_node=2, fixed={}, offloads=True)]
    offloads = {(c.layout.data_parallel, c.offload) for c in choices}
    assert {kind for kind, offload in offloads if offload != "none"} == {"fsdp"}
    assert {offload for _, offload in offloads} == {"none", "optimizer_states", "params"}
    assert {c.offload for c in listed()} == {"none"}
    modes = {c.config.train.activation_checkpointing for c in choices}
    assert modes == {"none", "selective", "full", "offload"}
    for c in choices:
        assert find_rule_violations(c.config) == []
        kinds = (c.offload != "none") + (c.settings["train.activation_checkpointing"] == "offload")
        assert c.rank_factor == 1 + kinds * OFFLOAD_GAIN


def test_candidates_keep_tensor_parallelism_in_node() -> None:
    assert {c.layout.tensor for c in listed()} == {1, 2, 4}
    assert {c.layout.tensor for c in listed("model.num_attention_heads=2")} == {1, 2}


def test_candidates_use_context_for_long_sequences_and_few_samples() -> None:
    assert {c.layout.context for c in listed()} == {1}
    long = listed("data.sequence_length=65536", "model.max_position_embeddings=65536")
    assert {c.layout.context for c in long} == {1, 2, 4}
    few = listed("train.global_batch_size=2", "model.num_attention_heads=1", "strategy=single")
    assert {(c.layout.data_ranks, c.layout.context) for c in few} == {(2, 4), (1, 4)}
    assert {c.layout.context for c in listed(**{"strategy.context.degree": 2})} == {2}


@pytest.mark.parametrize(("kind", "degrees"), [("qwen3", {1, 2, 4}), ("falcon", {1})])
def test_a_model_of_transformers_gets_context_where_its_sequences_can_be_divided(
    kind: str, degrees: set[int]
) -> None:
    long = without_folder(kind, "data.sequence_length=32768", "train.global_batch_size=4")
    choices = candidates(config.load(long), devices=4, in_node=4, fixed={})
    assert {c.layout.context for c in choices} == degrees


@pytest.mark.parametrize(
    ("kind", "more", "divides"),
    [
        ("qwen3", [], {True}),
        ("qwen3", ["data.sequence_length=15"], {False}),
        ("gpt2", [], {False}),
        ("mixtral", [], {False, True}),
    ],
)
def test_a_model_of_transformers_gets_sequence_parallelism_where_its_hidden_states_can_be_divided(
    kind: str, more: list[str], divides: set[bool]
) -> None:
    chosen = config.load(without_folder(kind, *more))
    choices = candidates(chosen, devices=2, in_node=2, fixed={})
    tensor = [c.config.strategy.tensor for c in choices if c.layout.tensor > 1]
    assert {chosen.sequence_parallel for chosen in tensor} == divides


@pytest.mark.parametrize("sequences", [False, True])
def test_candidates_follow_registration_of_model(sequences: bool) -> None:
    plan = {"layers.*": "column"}
    ax.register_model("stacked", layers="layers", tensor_plan=plan, sequence_parallel=sequences)(
        Stacked
    )
    chosen = config.load(["model=stacked", *TINY[3:]])
    choices = [*candidates(chosen, devices=4, in_node=4, fixed={})]
    assert {c.layout.tensor for c in choices} == {1, 2, 4}
    assert {c.layout.pipeline for c in choices} == {1, 2, 4}
    divided = {c.config.strategy.tensor.sequence_parallel for c in choices if c.layout.tensor > 1}
    assert divided == {sequences}


def test_a_model_without_a_tensor_plan_is_offered_no_tensor_ranks() -> None:
    ax.register_model("stacked", layers="layers")(Stacked)
    choices = candidates(config.load(["model=stacked", *TINY[3:]]), devices=4, in_node=4, fixed={})
    assert {c.layout.tensor for c in choices} == {1}


@pytest.mark.parametrize(
    ("key", "value", "more"),
    [
        ("strategy.tensor.degree", 2, {}),
        ("strategy.tensor.sequence_parallel", False, {"strategy.tensor.degree": 2}),
        ("strategy.pipeline.schedule", "gpipe", {"strategy.pipeline.degree": 2}),
        ("strategy.pipeline.degree", 2, {}),
        ("strategy.fsdp.sharding", "no_shard", {}),
        ("strategy.fsdp.cpu_offload", "full", {}),
        ("strategy.fsdp.replicate", 2, {}),
        ("strategy.data_parallel", "fsdp", {"strategy.tensor.degree": 4}),
        ("train.micro_batch_size", 3, {}),
        ("train.activation_checkpointing", "full", {}),
        ("train.loss_chunk", 8, {}),
        (
            "strategy.pipeline.stages_per_rank",
            2,
            {"strategy.pipeline.degree": 2, "strategy.pipeline.schedule": "looped_bfs"},
        ),
    ],
)
def test_candidates_keep_user_settings(key: str, value: Any, more: dict[str, Any]) -> None:
    assert key in SEARCHED
    choices = listed("train.global_batch_size=48", devices=4, **{key: value, **more})
    assert choices
    assert {config.flatten(c.config)[key] for c in choices} == {value}
    for c in choices:
        assert find_rule_violations(c.config) == []
        assert broken_world_rules(c.config, world_size=4) == []


def test_candidates_include_other_strategies() -> None:
    choices = listed("strategy=zero2")
    assert {"ddp", "zero1", "fsdp"} <= {c.layout.data_parallel for c in choices}
    for c in choices:
        assert find_rule_violations(c.config) == []


def test_indivisible_batch_has_no_candidates() -> None:
    assert listed("train.global_batch_size=1", "model.num_attention_heads=1", devices=7) == []


def test_optimizer_with_shard_exchange_gets_no_offload_candidates() -> None:
    chosen = config.load([*TINY, "optimizer=muon"])
    choices = [*candidates(chosen, devices=2, in_node=2, fixed={}, offloads=True)]
    assert {c.offload for c in choices} == {"none"}
    assert "fsdp" in {c.layout.data_parallel for c in choices}


def test_candidates_shard_over_parts_of_a_node_and_several_nodes() -> None:
    chosen = config.load([*TINY, "train.global_batch_size=64"])
    choices = candidates(chosen, devices=32, in_node=4, fixed={"strategy.pipeline.degree": 1})
    shards = {
        c.layout.dp_shard
        for c in choices
        if c.config.strategy.fsdp.sharding == "hybrid_shard" and c.layout.tensor == 1
    }
    assert shards == {2, 4, 8, 16}


@pytest.mark.parametrize(("kind", "degrees"), [("qwen3", {1, 2, 4}), ("llama", {1, 2, 4})])
def test_tensor_ranks_of_a_model_of_transformers_may_share_key_value_heads(
    kind: str, degrees: set[int]
) -> None:
    # 4 heads, 2 key-value heads
    chosen = config.load(without_folder(kind, "train.global_batch_size=4"))
    choices = candidates(chosen, devices=4, in_node=4, fixed={})
    assert {c.layout.tensor for c in choices} == degrees


def test_candidates_divide_experts_inside_a_node_and_over_full_nodes() -> None:
    chosen = config.load(without_folder("qwen3_moe", "train.global_batch_size=16", num_experts=64))
    choices = [*candidates(chosen, devices=16, in_node=4, fixed={"strategy.pipeline.degree": 1})]
    assert {c.layout.expert for c in choices} == {1, 2, 4, 8, 16}
    for c in choices:
        assert find_rule_violations(c.config) == []
        assert broken_world_rules(c.config, world_size=16) == []
    kinds = {c.layout.data_parallel for c in choices if c.layout.expert > 1}
    assert kinds == {"fsdp"}
    compiled = config.with_values(chosen, {"train.compile": True})
    choices = [*candidates(compiled, devices=4, in_node=4, fixed={})]
    assert {c.layout.expert for c in choices} == {1}
    assert {c.config.train.activation_checkpointing for c in choices} == {"none"}
