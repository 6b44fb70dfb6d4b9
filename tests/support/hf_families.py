"""Builds the smallest possible models of the families in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_GATED = {**_HEADS, "intermediate_size": 128}
_WINDOW = {**_GATED, "sliding_window": 16}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"num_attention_heads": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"num_attention_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0},
    "llama": {**_GATED, "rope_parameters": _LLAMA3_ROPE},
    "qwen2": _GATED,
    "qwen3": {**_GATED, "head_dim": 16},
    "mistral": _WINDOW,
    "gemma2": {**_WINDOW, "head_dim": 16},
    "gemma3_text": {**_WINDOW, "head_dim": 16},
    "phi3": {**_GATED, "pad_token_id": 0},
    "gpt_neox": {"num_attention_heads": 4, "intermediate_size": 128},
    "bloom": {"n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "olmo2": _GATED,
    "mixtral": {**_GATED, "num_local_experts": 4, "router_aux_loss_coef": 0.0},
    "qwen3_moe": {
        **_GATED,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.0,
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    kind: {
        "model_type": kind,
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
        **own,
    }
    for kind, own in _OWN.items()
}
"""Configurations by ``model_type``."""
del FAMILIES["bloom"]["max_position_embeddings"]


SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "v_head_dim": 12,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "vocab_size": 256,
        "hidden_size": 64,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "intermediate_size": 32,
        "max_position_embeddings": 128,
        **_HEADS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
"""Blocks that differ, values narrower than keys, attention sinks, windows and full attention."""

_ROUTED = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    **_GATED,
}
ROUTED: dict[str, dict[str, Any]] = {
    "olmoe": {**_ROUTED, "model_type": "olmoe", "num_experts": 4, "router_aux_loss_coef": 0.0},
    "qwen2_moe": {
        **_ROUTED,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "router_aux_loss_coef": 0.0,
    },
    "glm4_moe": {
        **_ROUTED,
        "model_type": "glm4_moe",
        "head_dim": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {**SPECIAL["deepseek_v3"], "n_group": 2},
    "gpt_oss": {**SPECIAL["gpt_oss"], "router_aux_loss_coef": 0.0},
}
"""More kinds of routers: shared experts, groups of experts, a bias of the choice."""


def without_folder(kind: str, *more: str, **changes: Any) -> list[str]:
    """Return overrides of a model that is described only by ``model.config``."""
    from axonlaunch.config.problems.errors import plain

    content = {**FAMILIES.get(kind, {"model_type": kind, "num_hidden_layers": 2}), **changes}
    data = ["data=synthetic_tokens", "data.sequence_length=32"]
    return ["model=hf", "model.init=random", f"model.config={plain(content)}", *data, *more]


def theirs(kind: str, **changes: Any) -> Any:
    """Return a model of a family with random weights, as transformers builds it."""
    import transformers

    content = {**({**FAMILIES, **SPECIAL, **ROUTED}[kind]), **changes}
    config = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save(kind: str, folder: Path, **changes: Any) -> Any:
    """Save a model of a family with ``save_pretrained`` and return the model."""
    model = theirs(kind, **changes)
    model.save_pretrained(folder)
    return model
