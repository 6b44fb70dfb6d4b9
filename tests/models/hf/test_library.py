"""Undocumented parts of transformers, which only ``models.hf.library`` uses.

If one fails with another version of transformers, change only that module.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support.hf_families import FAMILIES

from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.models.fake.fake_tensor_cache import fake_tensor_mode
from axonlaunch.models.hf.analysis.structure import structure
from axonlaunch.models.hf.reading import library


def model(kind: str) -> Any:
    return structure(HuggingFaceConfig(config=FAMILIES[kind], init="random")).model


def test_consecutive_positions_need_no_mask() -> None:
    library.transformers()
    from transformers import masking_utils

    positions = torch.arange(8)[None]
    assert masking_utils.find_packed_sequence_indices(positions) is None
    restarting = torch.cat([positions, positions], dim=1)
    assert masking_utils.find_packed_sequence_indices(restarting) is not None
    with fake_tensor_mode():
        assert masking_utils.find_packed_sequence_indices(torch.empty_like(positions)) is None


@pytest.mark.parametrize("longest", [2, 64])
def test_rotary_tables_by_longest_position_build_on_fake_tensors(longest: int) -> None:
    library.transformers()
    from transformers import modeling_rope_utils

    if "torch.where(seq_len" not in inspect.getsource(modeling_rope_utils):
        pytest.skip("this version branches on the longest position: it is refused without values")
    rotary = {"rope_type": "longrope", "rope_theta": 10000.0}
    rotary |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    long = {"rope_parameters": rotary, "original_max_position_embeddings": longest}
    config = HuggingFaceConfig(config={**FAMILIES["phi3"], **long}, init="random")
    assert structure(config).flow.problem == ""


def test_replaced_mask_function_builds_mask() -> None:
    library.transformers()
    from transformers import masking_utils

    code = inspect.getsource(masking_utils._preprocess_mask_arguments)
    assert "packed_sequence_mask = find_packed_sequence_indices(position_ids)" in code


def test_experts_in_checkpoint_are_found_by_transformers_conversion() -> None:
    names = [f"model.layers.0.mlp.experts.{n}.gate_proj.weight" for n in range(4)]
    mapped = list(library.targets(model("qwen3_moe"), names))
    assert [source for source, *_ in mapped] == names
    assert {target for _, target, *_ in mapped} == {"model.layers.0.mlp.experts.gate_up_proj"}
    assert len({id(converter) for *_, converter in mapped}) == 1


def test_packed_experts_are_written_one_by_one() -> None:
    packed = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 64, 64)}
    unpacked = library.revert_conversion(model("qwen3_moe"), packed)
    kinds = ("gate_proj", "up_proj")
    assert unpacked.keys() == {
        f"model.layers.0.mlp.experts.{n}.{kind}.weight" for n in range(4) for kind in kinds
    }


def test_config_keys_read_only_by_code_are_known() -> None:
    assert "head_dim" in library.keys_read_by_code(library.config_types()["qwen3_moe"])


@pytest.mark.parametrize("kind", ["llama", "bert", "gemma3_text"])
def test_dtypes_are_parsed_by_name(kind: str) -> None:
    assert kind in library.causal_types()
    assert kind in library.config_types()


@pytest.mark.parametrize(
    ("device", "dtype", "shares"),
    [("cuda", torch.float32, False), ("cuda", torch.bfloat16, True), ("cpu", torch.float32, True)],
)
def test_grouped_heads_use_fused_kernel_if_supported(
    device: str, dtype: torch.dtype, shares: bool
) -> None:
    """Otherwise torch silently uses the kernel that holds all scores."""
    library.transformers()
    from transformers.integrations import sdpa_attention

    with fake_tensor_mode():
        key = torch.empty(1, 2, 4, 8, device=device, dtype=dtype)
        values = [key] if "value" in inspect.signature(sdpa_attention.repeat_kv).parameters else []
        assert sdpa_attention.use_gqa_in_sdpa(None, key, *(values or [key])) is shares
    assert "use_gqa_in_sdpa(attention_mask, key" in inspect.getsource(sdpa_attention)
