"""Rows with several documents compute the same as each document in a separate row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import hf_families
from torch import Tensor, nn

from axonlaunch.config.options.model import GPTConfig, HuggingFaceConfig, LlamaConfig
from axonlaunch.models.build import build_model, spec_for

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OWN: dict[str, Any] = {
    "gpt": GPTConfig(**SIZES),
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=48),
}
THEIRS = {kind: content for kind, content in hf_families.FAMILIES.items() if kind != "bloom"}
THEIRS |= hf_families.SPECIAL
LENGTHS = [7, 1, 16]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1)


def theirs(kind: str, **keys: Any) -> HuggingFaceConfig:
    pytest.importorskip("transformers")
    return HuggingFaceConfig(config=dict(THEIRS[kind]), init="random", **keys)


def built(config: Any) -> nn.Module:
    model = build_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name or name.endswith("bias"):  # zero at the start, so without effect
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    return model.eval()


def logits(outputs: Any) -> Tensor:
    result: Tensor = getattr(outputs, "logits", outputs)
    return result


@pytest.mark.slow(keep=7)
@pytest.mark.parametrize("kind", [*OWN, *(f"hf-{kind}" for kind in THEIRS)])
def test_packed_documents_equal_separate_documents(kind: str) -> None:
    config = OWN[kind] if kind in OWN else theirs(kind.removeprefix("hf-"))
    assert not spec_for(config).unpackable()
    model = built(config)
    tokens = torch.randint(0, 250, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    alone = torch.cat([logits(model(document)) for document in tokens.split(LENGTHS, 1)], 1)
    F.cross_entropy(alone.flatten(0, 1), tokens.flatten()).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    packed = logits(model(tokens, positions=POSITIONS))
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=2e-6)
    F.cross_entropy(packed.flatten(0, 1), tokens.flatten()).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=2e-6)


def test_packed_documents_are_separate_in_every_cpu_attention() -> None:
    tokens = torch.randint(0, 250, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    eager, sdpa = (
        logits(built(theirs("llama", attention=name))(tokens, positions=POSITIONS))
        for name in ("eager", "sdpa")
    )
    torch.testing.assert_close(eager, sdpa, rtol=1e-5, atol=2e-6)


def test_model_with_internal_positions_refuses_packing() -> None:
    pytest.importorskip("transformers")
    config = HuggingFaceConfig(config=dict(hf_families.FAMILIES["bloom"]), init="random")
    assert spec_for(config).unpackable() == (
        "it counts positions from 0 instead of using the positions it is given"
    )


def test_model_with_other_token_mixing_refuses_packing() -> None:
    pytest.importorskip("transformers")
    content = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 256}
    config = HuggingFaceConfig(config=content, init="random")
    assert spec_for(config).unpackable()
