"""A model of any family has a small version of the same architecture, or an error with the
reason.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.hf_families import FAMILIES, SPECIAL

from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.models.facts.source import ModelDivision, NotReducibleError
from axonlaunch.models.hf.analysis.reduced import reduce_model, refuse_unlike, vocabulary
from axonlaunch.models.hf.analysis.structure import structure

HYBRID = ModelDivision(stages=2, tensor=2, original_tensor=2)


def described(kind: str, **changes: Any) -> HuggingFaceConfig:
    return HuggingFaceConfig(config={"model_type": kind, **changes}, init="random")


def full_size(kind: str) -> HuggingFaceConfig:
    """Return a family's default sizes with fewer blocks: realistic, and quickly built."""
    figures = SPECIAL.get(kind) or {"num_hidden_layers": 8}
    types = figures.get("layer_types")
    return described(kind, num_hidden_layers=figures["num_hidden_layers"], **_types(types))


def _types(types: list[str] | None) -> dict[str, Any]:
    return {} if types is None else {"layer_types": types}


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("kind", [*FAMILIES, *SPECIAL])
def test_every_family_has_a_small_model_of_its_architecture(kind: str) -> None:
    large = full_size(kind)
    small = reduce_model(large, HYBRID)
    assert 0 < refuse_unlike(large, small) < 2_000_000
    assert vocabulary(small) % 2 == vocabulary(large) % 2
    original, after = structure(large), structure(small)
    assert set(after.kinds) == set(original.kinds)
    assert 2 <= len(after.kinds) <= 4


@pytest.mark.parametrize(
    ("heads", "keys", "division", "few"),
    [
        (64, 8, ModelDivision(tensor=8, original_tensor=8), (64, 8)),
        (64, 8, ModelDivision(tensor=2, original_tensor=8), (16, 2)),
        # Two ranks hold a head, as in the original model.
        (64, 8, ModelDivision(tensor=2, original_tensor=16), (8, 1)),
        (32, 32, ModelDivision(tensor=2, original_tensor=2), (2, 2)),
        (24, 1, ModelDivision(), (24, 1)),
    ],
)
def test_reduced_model_keeps_head_ratio_and_division(
    heads: int, keys: int, division: ModelDivision, few: tuple[int, int]
) -> None:
    large = described(
        "llama", num_attention_heads=heads, num_key_value_heads=keys, hidden_size=heads * 64
    )
    typed = structure(reduce_model(large, division)).typed
    assert (typed.num_attention_heads, typed.num_key_value_heads) == few


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {"num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 2048}),
        ("qwen3_moe", {"num_attention_heads": 16, "head_dim": 64, "hidden_size": 1024}),
        ("deepseek_v3", {}),
    ],
)
def test_rows_of_reduced_model_are_whole_blocks_on_each_rank(
    kind: str, sizes: dict[str, int]
) -> None:
    division = ModelDivision(tensor=2, original_tensor=2, block=64)
    model = structure(reduce_model(described(kind, **sizes), division)).model
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            is_divided = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
            assert parameter.shape[-1] % (128 if is_divided else 64) == 0, name


def test_reduced_model_is_equal_for_other_width_and_depth() -> None:
    def small(**figures: Any) -> dict[str, Any]:
        large = described("qwen3", vocab_size=32000, head_dim=64, **figures)
        content: dict[str, Any] = structure(reduce_model(large, HYBRID)).typed.to_dict()
        return content

    first = small(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8)
    other = small(
        hidden_size=2048, num_attention_heads=32, num_key_value_heads=16, num_hidden_layers=28
    )
    del first["intermediate_size"], other["intermediate_size"]
    assert first == other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("recurrent_gemma", "with few blocks its parts differ: "),
        ("blt", "is large even with few blocks"),
    ],
)
def test_model_that_cannot_be_reduced_has_reason(kind: str, reason: str) -> None:
    large = described(kind)
    with pytest.raises(NotReducibleError, match=reason):
        refuse_unlike(large, reduce_model(large, HYBRID))
