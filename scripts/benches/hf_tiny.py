"""Tiny configurations of every causal language model of transformers.

Classes that can't be built with these sizes have different ones in ``OWN``.
"""

from __future__ import annotations

from typing import Any

BLOCKS = 4
"""Number of blocks, enough for four stages of a zero-bubble pipeline on two ranks."""

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "sliding_window": 16,
    "num_kv_shared_layers": 0,
    "n_shared_experts": 1,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 256,
    "unpadded_vocab_size": 256,
    "laurel_rank": 16,
    "num_experts_per_token": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 8,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 16,
    "rotary_dim": 8,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Tiny sizes by their usual names; each class gets those that it has."""

NOTES = {"phimoe": "with model.config.router_jitter_noise=0"}
"""Settings that equality needs, by model type."""

_BLT_PART = {
    "vocab_size": 260,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
}
OWN: dict[str, dict[str, Any]] = {
    "opt": {"word_embed_proj_dim": 64},
    "longcat_flash": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (BLOCKS // 2)},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"] * (BLOCKS // 2),
        "num_dense_layers": 1,
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "phimoe": {"router_jitter_noise": 0.0},  # otherwise routers choose among close scores at random
    "big_bird": {"attention_type": "original_full"},  # sparse attention draws random blocks
    "cpmant": {"init_std": 0.02, "dim_head": 16, "dim_ff": 128},
    "blt": {
        "patch_in_forward": False,
        "encoder_hash_byte_group_vocab": 64,
        "patcher_config": _BLT_PART,
        "encoder_config": {**_BLT_PART, "hidden_size_global": 64},
        "decoder_config": {**_BLT_PART, "hidden_size_global": 64},
        "global_config": {k: v for k, v in _BLT_PART.items() if k != "vocab_size"},
    },
    "dots3_note_text": {
        # Sliding blocks have the published model's size by default.
        "per_layer_config": {
            str(block): {
                **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
                **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"), 16),
                "head_dim": 24,
                "v_head_dim": 16,
                "qk_rope_head_dim": 8,
            }
            for block in range(1, BLOCKS, 2)
        },
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 16,
        "shared_experts_intermediate_size": 32,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_count": 2,
        "hc_lowrank": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2},
    "zaya": {"num_experts_per_tok": 1},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "plbart": {"decoder_attention_heads": 4, "decoder_layers": BLOCKS},
    "whisper": {"decoder_attention_heads": 4, "decoder_layers": BLOCKS},
    "mamba2": {"num_heads": 8},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0, "kv_n_heads": 2}},
    "gpt_neo": {"attention_types": [[["global", "local"], BLOCKS // 2]], "window_size": 16},
}
"""Additional sizes, for configurations that need them."""


def model_types() -> list[str]:
    """Return a ``model_type`` of each causal-LM class, the first that is only for text."""
    from axonlaunch.models.hf.reading import library

    kinds: dict[str, list[str]] = {}
    for kind, cls in library.causal_types().items():
        kinds.setdefault(str(cls), []).append(kind)
    return sorted(min(alike, key=is_composite) for alike in kinds.values())


def is_composite(kind: str) -> bool:
    """Return whether a ``model_type`` is a composite of images or sound with a text model."""
    from axonlaunch.models.hf.reading import library

    return "text_config" in library.config_types()[kind].sub_configs


def tiny(kind: str) -> dict[str, Any]:
    """Return a family's configuration that makes a model of some thousand parameters."""
    from axonlaunch.models.hf.reading import library

    cls = library.config_types()[kind]
    figures = _figures(cls)
    # for image models: the configuration of its language model
    if "text_config" in cls.sub_configs:
        with library.quiet():
            text = type(cls().text_config)
        own = OWN.get(text.model_type, {})
        figures["text_config"] = {"model_type": text.model_type, **_figures(text), **own}
    return {"model_type": kind, **figures, **OWN.get(kind, {})}


def _figures(cls: Any) -> dict[str, Any]:
    """Return the tiny sizes that a class of configurations has."""
    from axonlaunch.models.hf import architecture
    from axonlaunch.models.hf.reading import library

    known = architecture.known_keys(cls) | library.keys_read_by_code(cls)
    settable = {key for key in known if not isinstance(_found(cls, key), property)}
    figures = {key: value for key, value in SIZES.items() if key in settable}
    if "qk_rope_head_dim" in figures:
        figures.pop("head_dim", None)  # it is derived, and every head has keys and values
        figures["num_key_value_heads"] = figures["num_attention_heads"]
    with library.quiet():
        defaults = cls()
    depth = getattr(defaults, "num_hidden_layers", None)
    for key in settable - figures.keys():
        value = _found(defaults, key)
        if isinstance(value, float) and ("drop" in key or "jitter" in key):
            figures[key] = 0.0
        elif isinstance(value, list) and len(value) == depth:
            figures[key] = _spread(value)
    return figures


def _found(owner: Any, key: str) -> Any:
    """Return an attribute under any name that it has; None if it has no single value."""
    attribute = getattr(owner, "attribute_map", {}).get(key, key)
    try:
        return getattr(owner, attribute, None)
    except Exception:  # a configuration may hold a value for each layer
        return None


def _spread(value: list[Any]) -> list[Any]:
    """Return a list with an entry for each block: two kinds in turn, if there are two."""
    other = next((item for item in value if item != value[0]), value[0])
    return [value[0], other] * (BLOCKS // 2)
