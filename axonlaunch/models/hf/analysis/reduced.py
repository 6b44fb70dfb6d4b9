"""Derives a small model of the same architecture, with few blocks of each kind, heads and experts.

If the result would still be large or have a different architecture, an error says why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from importlib.metadata import version
from typing import Any, TypeVar

from torch import nn

from axonlaunch.config.options.model import TransformersModel
from axonlaunch.config.problems.errors import ConfigError
from axonlaunch.models.facts.source import LARGEST_SMALL_MODEL, ModelDivision, NotReducibleError
from axonlaunch.models.hf.analysis.structure import structure
from axonlaunch.models.hf.architecture import architecture, canonical
from axonlaunch.models.hf.reading import files

_Model = TypeVar("_Model", bound=TransformersModel)
_HEAD_SIZE = 16
_HIDDEN = 64
_TOKENS = 64
_MAX_WIDTH_RATIO = 4  # relative to the residual stream
_WINDOW = 8
_EXPERTS = 4
_MAX_BLOCKS = 16
# Keys that determine the kind of each block if no list has an entry for each block.
_PERIODS = (
    *("attn_layer_period", "expert_layer_period", "decoder_sparse_step", "layer_group_size"),
    *("global_attn_every_n_layers", "no_rope_layer_interval", "sliding_window_pattern"),
    *("full_attention_interval", "moe_layer_freq", "interleave_moe_layer_step"),
)
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
# Keys of the number of query heads, with the possible keys of the number of key-value heads.
_HEADS = {
    "num_attention_heads": ("num_key_value_heads", "num_kv_heads"),
    "swa_num_attention_heads": ("swa_num_key_value_heads",),
    "linear_num_value_heads": ("linear_num_key_heads",),
}
_HEAD_SIZES = (
    *("head_dim", "swa_head_dim", "linear_key_head_dim", "linear_value_head_dim", "kv_channels"),
    *("index_head_dim", "linear_head_dim", "attention_head_dim", "qk_nope_head_dim"),
)
# Scaled like the hidden size.
_WIDTHS = (
    *("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "dense_intermediate_size"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"),
    *("shared_intermediate_size", "intermediate_size_mlp", "shared_experts_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim"),
    *("word_embed_proj_dim", "lru_width", "hidden_size_per_layer_input", "embedding_size"),
    *("mamba_d_ssm", "laurel_rank", "dim_ff", "feed_forward_size", "attention_hidden_size"),
)
_RANKS = ("kv_lora_rank", "q_lora_rank", "o_lora_rank")
_WINDOWS = (
    *("sliding_window", "window_size", "attention_window_size", "sliding_window_size"),
    *("attention_chunk_size", "local_attention", "index_topk", "local_attention_window_len"),
)
_NUMBERS_OF_EXPERTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
)
_ACTIVE_EXPERTS = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
)
# State space models: width relative to the residual stream, number of heads, size of a head.
_STATE_SPACES = (
    ("expand", "num_heads", "head_dim"),
    ("mamba_expand", "mamba_n_heads", "mamba_d_head"),
)
_STATE_SIZES = {
    "state_size": 8,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "time_step_rank": 8,
    "mamba_dt_rank": 8,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "n_groups": 2,
    "mamba_n_groups": 2,
}
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")


def reduce_model(config: _Model, division: ModelDivision) -> _Model:
    """Return the configuration of a small model of the same architecture.

    Raises:
        ConfigError: The architecture can't be determined.
        NotReducibleError: transformers rejects the configuration of the small model.
    """
    typed = architecture(config)
    sizes = dict(_small_sizes(typed, division))
    replaced = canonical(sizes, typed)
    overrides = {
        k: v for k, v in config.config.items() if not canonical({k: v}, typed).keys() & replaced
    }
    small = replace(config, config={**overrides, **sizes})
    try:
        architecture(small)
    except ConfigError as error:
        raise NotReducibleError(error.problems[0].message) from error
    return small


def vocabulary(small: TransformersModel) -> int:
    """Return the vocabulary size of a small model.

    Raises:
        NotReducibleError: The configuration lacks ``vocab_size``.
    """
    size = _number(architecture(small), "vocab_size")
    if size is None:
        raise NotReducibleError("its configuration has no vocab_size")
    return size


def identity(small: TransformersModel) -> dict[str, Any]:
    """Return everything that determines a small model's computation, except torch."""
    content = architecture(small).to_dict()
    del content["transformers_version"]
    content.pop("_name_or_path", None)
    code = {}
    if small.trust_remote_code and (folder := files.folder(small)) is not None:
        code = {file.name: file.read_text() for file in sorted(folder.glob("*.py"))}
    return {
        "config": content,
        "attention": small.attention,
        "code": code,
        "transformers": version("transformers"),
    }


def refuse_unlike(config: TransformersModel, small: TransformersModel) -> int:
    """Check that a small model consists of the same parts; return its number of parameters.

    Raises:
        ConfigError: The original model can't be built.
        NotReducibleError: The small model is too large or consists of other parts.
    """
    original = structure(config)
    try:
        reduced = structure(small)
    except ConfigError as error:
        raise NotReducibleError(error.problems[0].message) from error
    count = sum(parameter.numel() for parameter in reduced.model.parameters())
    if count > LARGEST_SMALL_MODEL:
        raise NotReducibleError(
            f"it is large even with few blocks, heads and experts: {count / 1e6:.0f}M parameters"
        )
    for aspect, expected, actual in (
        ("parts", _parts(original.model), _parts(reduced.model)),
        ("kinds of blocks", set(original.kinds), set(reduced.kinds)),
        ("tied weights", _without_numbers(original.ties), _without_numbers(reduced.ties)),
    ):
        if different := sorted(expected ^ actual):
            raise NotReducibleError(
                f"with few blocks its {aspect} differ: {', '.join(different[:3])}"
            )
    return count


def _parts(model: nn.Module) -> set[str]:
    """Return the kinds and names of all modules and parameters, without block numbers."""
    modules = {
        f"{name} ({type(module).__name__})" for name, module in model.named_modules() if name
    }
    return _without_numbers(modules) | _without_numbers(dict(model.named_parameters()))


def _without_numbers(names: Mapping[str, Any] | set[str]) -> set[str]:
    return {re.sub(r"\.\d+(?=[. ]|$)", ".*", name) for name in names}


def _small_sizes(typed: Any, division: ModelDivision) -> Iterator[tuple[str, Any]]:
    """Yield the configuration keys and values that make the model small."""
    yield from _blocks(typed, division.stages)
    for queries in _HEADS:
        if _number(typed, queries) is not None:
            count, shared_count = _heads(typed, queries, division)
            yield queries, count
            yield from ((name, shared_count) for name in _HEADS[queries] if _number(typed, name))
    hidden, small = _hidden(typed, division)
    yield "hidden_size", small
    for name in _WIDTHS:
        if (value := _number(typed, name)) is not None and value > 0:
            width = min(value * small / hidden, _MAX_WIDTH_RATIO * small)
            yield name, _rounded(width, math.lcm(8, division.block) * division.tensor)
    yield from _head_sizes(typed, division)
    yield from _state_sizes(typed, small)
    yield from _expert_sizes(typed)
    yield from _token_sizes(typed, division)
    for name in _WINDOWS:
        if _number(typed, name) is not None:
            yield name, _WINDOW


def _hidden(typed: Any, division: ModelDivision) -> tuple[int, int]:
    """Return the widths of the residual stream in the original and in the small model."""
    hidden = _number(typed, "hidden_size") or 1
    count = _number(typed, "num_attention_heads")
    if count is None:
        return hidden, _HIDDEN
    small_count, _ = _heads(typed, "num_attention_heads", division)
    size = _number(typed, "head_dim")
    if size is None:  # the size of a head follows from the hidden size
        return hidden, small_count * _head_size(small_count, division)
    width = small_count * _head_size(small_count, division) / (count * size)
    multiple = math.lcm(small_count, 8 * division.tensor, division.block)
    return hidden, _rounded(hidden * width, multiple)


def _token_sizes(typed: Any, division: ModelDivision) -> Iterator[tuple[str, Any]]:
    vocabulary = _number(typed, "vocab_size") or 1
    tokens = _TOKENS * division.tensor + (1 if vocabulary % division.original_tensor else 0)
    for name in _VOCABULARIES:
        if _number(typed, name) is not None:
            yield name, tokens
    for field in fields(typed):
        token = _read(typed, field.name) if field.name.endswith("_token_id") else None
        if isinstance(token, int) and token >= tokens:
            yield field.name, 0
        elif isinstance(token, list):
            yield field.name, [0]


def _state_sizes(typed: Any, hidden: int) -> Iterator[tuple[str, Any]]:
    """Yield sizes of a state space model; its heads together must have its full width."""
    for expand, heads, size in _STATE_SPACES:
        factor = _number(typed, expand)
        if factor is not None and _number(typed, heads) is not None:
            yield heads, 4
            yield size, factor * hidden // 4
    for name, maximum in _STATE_SIZES.items():
        if (value := _number(typed, name)) is not None:
            yield name, min(value, maximum)


def _head_sizes(typed: Any, division: ModelDivision) -> Iterator[tuple[str, Any]]:
    count, _ = _heads(typed, "num_attention_heads", division)
    is_latent = _number(typed, "qk_rope_head_dim") is not None
    for name in _HEAD_SIZES:
        if _number(typed, name) is not None and not (is_latent and name == "head_dim"):
            yield name, _head_size(count, division)
    if is_latent:
        yield "qk_rope_head_dim", _head_size(count, division) // 2
        is_even = _number(typed, "v_head_dim") == _number(typed, "qk_nope_head_dim")
        yield "v_head_dim", _head_size(count, division) if is_even or division.block > 1 else 12
    for name in _RANKS:
        if _number(typed, name) is not None:
            rank = _HEAD_SIZE if name == "kv_lora_rank" else 24
            yield name, rank if division.block == 1 else division.block
    if (rotary := _number(typed, "rotary_dim")) is not None:
        size = (_number(typed, "hidden_size") or 1) // (_number(typed, "num_attention_heads") or 1)
        yield "rotary_dim", max(2, _head_size(count, division) * rotary // max(1, size) // 2 * 2)


def _expert_sizes(typed: Any) -> Iterator[tuple[str, Any]]:
    for name in _NUMBERS_OF_EXPERTS:
        if (value := _number(typed, name)) is not None:
            yield name, min(value, _EXPERTS)
    for name in _ACTIVE_EXPERTS:
        if (value := _number(typed, name)) is not None:
            yield name, min(value, 2)
    groups, active = _number(typed, "n_group"), _number(typed, "topk_group")
    if groups is not None and active is not None:
        yield "n_group", min(groups, 2)
        yield "topk_group", 1 if active < groups else min(groups, 2)


def _heads(typed: Any, queries: str, division: ModelDivision) -> tuple[int, int]:
    """Return smaller numbers of query and key-value heads in the same ratio.

    The layout splits them in the same way as the original heads: if several ranks share a key-value
    head, they still do.
    """
    count = _number(typed, queries) or 1
    keys = next(filter(None, (_number(typed, name) for name in _HEADS[queries])), count)
    group = max(1, count // keys)
    if keys < division.original_tensor:  # several ranks share each head
        small_keys = max(1, division.tensor * keys // division.original_tensor)
    else:
        small_keys = min(keys, max(2, division.tensor))
    return small_keys * group, small_keys


def _head_size(heads: int, division: ModelDivision) -> int:
    """Return a small size of a head; the heads of a rank together have whole blocks."""
    size = _HEAD_SIZE if heads <= _HEAD_SIZE else _HEAD_SIZE // 2
    if division.block == 1:
        return size
    blocks = division.block * division.tensor
    return math.lcm(size, blocks // math.gcd(blocks, heads))


def _blocks(typed: Any, stages: int) -> Iterator[tuple[str, Any]]:
    """Yield the number of blocks, and shortened lists with an entry for each remaining block."""
    depth = _number(typed, "num_hidden_layers") or 0
    lists = {
        field.name: list(value)
        for field in fields(typed)
        if isinstance(value := _read(typed, field.name), list | tuple) and len(value) == depth > 1
    }
    minimum = max(2, stages)
    for name in _PERIODS:
        minimum = max(minimum, min(_number(typed, name) or 0, _MAX_BLOCKS))
    for name in _DENSE_FIRST:
        if (value := _number(typed, name)) is not None and 0 < value < depth:
            yield name, 1
    selected = _select_blocks(
        [str([values[n] for values in lists.values()]) for n in range(depth)], minimum
    )
    if len(selected) >= depth:
        return
    yield "num_hidden_layers", len(selected)
    for name, value in lists.items():
        yield name, [value[number] for number in selected]


def _select_blocks(kinds: list[str], minimum: int) -> list[int]:
    """Return the indices of the first block of each kind, and further ones up to ``minimum``."""
    first = {kind: number for number, kind in reversed([*enumerate(kinds)])}
    selected = set(first.values())
    others = [number for number in range(len(kinds)) if number not in selected]
    return sorted(selected | set(others[: max(0, minimum - len(selected))]))


def _rounded(value: float, multiple: int) -> int:
    return max(multiple, round(value / multiple) * multiple)


def _number(typed: Any, name: str) -> int | None:
    """Return an integer setting of a configuration; None if it is missing or no integer."""
    field_names = {field.name for field in fields(typed)}
    mapped_name = getattr(typed, "attribute_map", {}).get(name, name)
    if mapped_name not in field_names and name not in field_names:
        return None
    value = _read(typed, mapped_name if mapped_name in field_names else name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read(typed: Any, name: str) -> Any:
    try:
        return getattr(typed, name, None)
    except Exception:  # some classes raise an error if the value differs between blocks
        return None
