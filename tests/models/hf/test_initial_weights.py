"""Random weights have transformers' distribution, and depend only on the seed and the name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.hf_families import FAMILIES, theirs

from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.models.build import build_model, construct
from axonlaunch.models.hf.analysis.structure import structure


def config(kind: str, **changes: Any) -> HuggingFaceConfig:
    return HuggingFaceConfig(config={**FAMILIES[kind], **changes}, init="random")


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_initial_weights_follow_transformers_distribution(kind: str) -> None:
    ours, expected = build_model(config(kind)), dict(theirs(kind).named_parameters())
    assert dict(ours.named_parameters()).keys() == expected.keys()
    for name, parameter in ours.named_parameters():
        wanted = expected[name]
        assert parameter.shape == wanted.shape
        assert parameter.dtype == wanted.dtype
        # For n numbers the mean is off by std / sqrt(n), and the deviation by std / sqrt(2 n).
        std, count = float(wanted.std()) if wanted.numel() > 1 else 0.0, wanted.numel()
        assert float(parameter.mean()) == pytest.approx(
            float(wanted.mean()), abs=8 * std / count**0.5 + 1e-9
        )
        if std:
            assert float(parameter.std()) == pytest.approx(std, rel=8 / (2 * count) ** 0.5)
        else:
            assert torch.equal(parameter, wanted)


@pytest.mark.parametrize("kind", FAMILIES)
def test_buffers_have_the_values_that_the_constructors_compute(kind: str) -> None:
    expected = dict(theirs(kind).named_buffers())
    ours = dict(build_model(config(kind)).named_buffers())
    assert ours.keys() == expected.keys()
    for name, buffer in ours.items():
        assert buffer.dtype == expected[name].dtype
        assert torch.equal(buffer, expected[name]), name


def test_parameters_have_no_storage_until_they_are_divided() -> None:
    model = construct(config("llama"), seed=0)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_initial_weights_depend_only_on_seed_and_name() -> None:
    deep = build_model(config("qwen3", num_hidden_layers=4), seed=3)
    torch.manual_seed(11)
    torch.rand(5)
    shallow = build_model(config("qwen3"), seed=3)
    for name, parameter in shallow.named_parameters():
        assert torch.equal(parameter, deep.get_parameter(name))
    other = build_model(config("qwen3"), seed=4)
    assert not torch.equal(other.get_parameter("lm_head.weight"), shallow.lm_head.weight)


def test_an_embedding_of_padding_starts_at_zero() -> None:
    table = build_model(config("phi3")).get_parameter("model.embed_tokens.weight")
    assert (table[0] == 0).all()
    assert (table[1:] != 0).any(1).all()


def test_full_tensor_initializers_are_supported() -> None:
    chosen = HuggingFaceConfig(
        config={
            "model_type": "mamba2",
            "vocab_size": 256,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 2,
        },
        init="random",
    )
    first, second = build_model(chosen, seed=1), build_model(chosen, seed=1)
    for name, parameter in first.named_parameters():
        assert torch.isfinite(parameter).all()
        assert torch.equal(parameter, second.get_parameter(name))
    steps = first.get_parameter("backbone.layers.0.mixer.dt_bias")
    others = build_model(chosen, seed=2).get_parameter("backbone.layers.0.mixer.dt_bias")
    assert not torch.equal(steps, others)
    assert not torch.equal(steps, first.get_parameter("backbone.layers.1.mixer.dt_bias"))


def test_building_model_does_not_use_global_generator() -> None:
    state = torch.get_rng_state()
    structure(config("gpt2", num_hidden_layers=1))
    build_model(config("gpt2", num_hidden_layers=1))
    assert torch.equal(state, torch.get_rng_state())
