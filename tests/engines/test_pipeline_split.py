"""Splits of a model into stages: balanced by time, with unchanged names."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st
from support.configured import run_config
from support.hf_families import without_folder
from torch import nn

from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.options.model import GPTConfig, LlamaConfig, MLPConfig, ViTConfig
from axonlaunch.engines.pipeline import split
from axonlaunch.engines.pipeline.split import (
    balance,
    block_names,
    cuttable,
    kept_everywhere,
    parts,
    stage_counts,
    stage_module,
)
from axonlaunch.models.build import build_model, construct, on_meta, spec_for
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.preflight.parallelism import pipeline_problems

GPT = GPTConfig(hidden_size=16, num_hidden_layers=4, num_attention_heads=2, vocab_size=32)
MODELS = [
    (GPT, torch.randint(0, 32, (2, 8))),
    (
        LlamaConfig(hidden_size=16, num_hidden_layers=4, num_attention_heads=2, vocab_size=32,
                    num_key_value_heads=1),
        torch.randint(0, 32, (2, 8)),
    ),
    (ViTConfig(hidden_size=16, image_size=8, num_attention_heads=2), torch.randn(2, 1, 8, 8)),
    (MLPConfig(input_size=64, hidden_size=16, num_hidden_layers=4), torch.randn(2, 1, 8, 8)),
]  # fmt: skip


@pytest.mark.parametrize(("config", "inputs"), MODELS, ids=lambda x: getattr(x, "name", ""))
@pytest.mark.parametrize("counts", [[4], [2, 2], [1, 3], [1, 1, 1, 1]], ids=str)
def test_pipeline_stages_in_sequence_equal_model(
    config: object, inputs: torch.Tensor, counts: list[int]
) -> None:
    full, spec = build_model(config), spec_for(config)
    x, names = inputs, []
    for part in parts(counts):
        stage = stage_module(spec, build_model(config), part)
        names += [name for name, _ in stage.named_parameters()]
        x = stage(x)
    torch.testing.assert_close(x, full(inputs))
    full_names = [name for name, _ in full.named_parameters()]
    assert set(full_names) <= set(names)
    assert set(names) - set(full_names) <= {"lm_head.weight"}  # tied ends have a name each


def test_sequential_is_split_between_modules_with_same_names() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    spec = ModelSpec(build=lambda _: model, loss=cross_entropy_sum)
    assert cuttable(spec, model)
    assert block_names(spec, model) == ["0", "1", "2"]
    last = stage_module(spec, model, parts([1, 2])[1])
    assert [name for name, _ in last.named_parameters()] == [
        f"{index}.{kind}" for index in (1, 2) for kind in ("weight", "bias")
    ]
    assert last(torch.ones(1, 4)).shape == (1, 8)


def test_model_without_ends_cannot_be_split() -> None:
    model = nn.Linear(2, 2)
    assert not cuttable(ModelSpec(build=lambda _: model, loss=cross_entropy_sum), model)


class Scaled(nn.Module):
    """Blocks between an embedding and a head, and a parameter in front of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = x if layer is None else layer(x)
        return x if self.head is None else self.head(x * self.scale)


def spec_of(*ends: tuple[str, ...]) -> ModelSpec:
    first, last = ends
    return ModelSpec(
        build=lambda _: Scaled(), loss=cross_entropy_sum, layers="layers", ends=(first, last)
    )


@pytest.mark.parametrize(
    ("ends", "reported"),
    [
        ((("embed",), ("scale", "head")), []),
        (
            (("embed",), ("scales", "head")),
            [
                "model.ends=scales: Scaled has no such attribute; "
                "at its top it has embed, layers, head"
            ],
        ),
        (
            (("embed",), ("head",)),
            [
                "model.ends: every stage would train a separate scale; "
                "add the module with it to the ends"
            ],
        ),
    ],
)
def test_missing_or_incomplete_ends_are_reported(
    ends: tuple[tuple[str, ...], ...], reported: list[str]
) -> None:
    config = run_config(["strategy=pipeline", "launch.nproc=2"])
    problems = pipeline_problems(config, spec_of(*ends), Scaled())
    assert [str(problem) for problem in problems] == reported


def test_modules_around_blocks_are_only_on_end_stages() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    spec = ModelSpec(build=lambda _: model, loss=cross_entropy_sum, layers="1")
    assert kept_everywhere(spec, model) == ["0.weight"]


def test_a_parameter_may_be_an_end() -> None:
    spec = spec_of(("embed",), ("scale", "head"))
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    assert stage_counts(spec, Scaled(), num_stages=2, sample=tokens) == [1, 1]
    first, last = (stage_module(spec, Scaled(), part) for part in parts([1, 1]))
    assert first.scale is None
    assert last(first(tokens)).shape == (1, 3, 8)


@given(
    costs=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    ends=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    data=st.data(),
)
def test_pipeline_split_minimizes_largest_stage(
    costs: list[int], ends: tuple[int, int], data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))

    def most(counts: tuple[int, ...]) -> float:
        stops = list(itertools.accumulate(counts))
        sums = [sum(costs[a:b]) for a, b in zip([0, *stops], stops, strict=False)]
        sums[0] += ends[0]
        sums[-1] += ends[1]
        return max(sums)

    counts = balance(costs, num_stages=num_stages, first=ends[0], last=ends[1])
    assert len(counts) == num_stages
    assert min(counts) >= 1
    assert sum(counts) == len(costs)
    cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
    every = (tuple(b - a for a, b in itertools.pairwise((0, *some, len(costs)))) for some in cuts)
    assert most(tuple(counts)) == min(map(most, every))


@pytest.mark.slow
def test_equal_blocks_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(hidden_size=32, num_hidden_layers=11, vocab_size=4096)
    tokens = torch.zeros(2, 64, dtype=torch.int64, device="meta")
    model, spec = construct(config, seed=0), spec_for(config)
    balance = partial(stage_counts, spec, model, sample=tokens)
    names = [name for name, _ in model.named_modules()]
    few = [balance(num_stages=n) for n in range(1, 9)]
    assert [name for name, _ in model.named_modules()] == names
    monkeypatch.setattr(ModelSpec, "repeats", lambda spec, module: False)
    assert few == [balance(num_stages=n) for n in range(1, 9)]


def test_pipeline_split_is_computed_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.zeros(16, dtype=torch.int64)
    counted = []

    def count(*_: object, num_stages: int, **__: object) -> list[int]:
        counted.append(num_stages)
        return [len(counted)] * num_stages

    def blocks(*overrides: str) -> list[int]:
        config = run_config(["strategy=pipeline", "launch.nproc=2", *overrides])
        layout = Layout.of(config, world_size=2)
        return split.stage_blocks(config, layout, on_meta(config, seed=0), sample=tokens)

    monkeypatch.setattr(split, "stage_counts", count)
    monkeypatch.setattr(split, "_balanced", {})
    assert blocks() == blocks() == [1, 1]
    assert blocks("model.num_attention_heads=8") == [2, 2]


def test_head_counts_as_blocks_of_last_stage() -> None:
    # Per token a block has 4 x 64 x 64 + 3 x 64 x 128 products, and attention to 32 positions; the
    # head has 64 x 2,560, four times as many.
    config = LlamaConfig(hidden_size=64, num_hidden_layers=12, num_attention_heads=4,
                         num_key_value_heads=4, intermediate_size=128, vocab_size=2560)  # fmt: skip
    tokens = torch.zeros(1, 32, dtype=torch.int64, device="meta")
    model, spec = construct(config, seed=0), spec_for(config)
    counts = partial(stage_counts, spec, sample=tokens)
    assert counts(model, num_stages=4) == [3, 4, 4, 1]
    narrow = construct(dataclasses.replace(config, vocab_size=16), seed=0)
    assert counts(narrow, num_stages=4) == [3, 3, 3, 3]


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3"])
def test_flops_of_transformers_models_are_those_of_products(kind: str) -> None:
    """Per token a block has the products of its parameters, and attention to 64 positions."""
    config = run_config(without_folder(kind, num_hidden_layers=2)).model
    model, spec = on_meta(config, seed=0), spec_for(config)
    tokens = torch.zeros(1, 64, dtype=torch.int64, device="meta")
    names = block_names(spec, model)
    before_blocks, first, second, after = split._flops_by_block(spec, model, names, tokens)
    hf = model.config
    active = sum(p.numel() for n, p in model.get_submodule(names[0]).named_parameters()
                 if p.ndim == 2)  # fmt: skip
    packed = sum(p.numel() for p in model.get_submodule(names[0]).parameters() if p.ndim == 3)
    if packed:
        active += packed * hf.num_experts_per_tok // hf.num_experts
    attention = 2 * 2 * 64 * 64 * hf.num_attention_heads * hf.head_dim
    assert before_blocks == 0
    assert first == second == 2 * 64 * active + attention
    assert after == 2 * 64 * hf.vocab_size * hf.hidden_size


def test_model_without_products_is_balanced_by_parameters() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.PReLU(4))
    spec = ModelSpec(build=lambda _: model, loss=cross_entropy_sum)
    assert stage_counts(spec, model, num_stages=2, sample=torch.ones(1, 4)) == [2, 2]


def test_measuring_blocks_keeps_statistics_and_modes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    spec = ModelSpec(build=lambda _: model, loss=cross_entropy_sum)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    stage_counts(spec, model, num_stages=2, sample=torch.ones(3, 4))
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert model[2].training
