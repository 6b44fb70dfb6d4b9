"""A small model of the same architecture: few blocks of each kind, few heads, few experts.

What stays large, or is another architecture once it is small, is refused with the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from axonlaunch.config.errors import ConfigError
from axonlaunch.config.model import HuggingFaceConfig
from axonlaunch.models.hf import files
from axonlaunch.models.hf.architecture import architecture, canonical
from axonlaunch.models.hf.structure import structure

LARGEST = 20_000_000
"""Parameters of the largest model that counts as small."""

_HEAD_SIZE = 16
_HIDDEN = 64
_TOKENS = 64
_WIDEST = 4  # times the residual stream
_WINDOW = 8
_EXPERTS = 4
_MOST_BLOCKS = 16
# A block finds its kind by these, where no list has an entry for each block.
_PERIODS = (
    *("attn_layer_period", "expert_layer_period", "decoder_sparse_step", "layer_group_size"),
    *("global_attn_every_n_layers", "no_rope_layer_interval", "sliding_window_pattern"),
    *("full_attention_interval", "moe_layer_freq", "interleave_moe_layer_step"),
)
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
# Heads of queries, and what heads of keys and values, which groups of them share, are called.
_HEADS = {
    "num_attention_heads": ("num_key_value_heads", "num_kv_heads"),
    "swa_num_attention_heads": ("swa_num_key_value_heads",),
    "linear_num_value_heads": ("linear_num_key_heads",),
}
_HEAD_SIZES = (
    *("head_dim", "swa_head_dim", "linear_key_head_dim", "linear_value_head_dim", "kv_channels"),
    *("index_head_dim", "linear_head_dim", "attention_head_dim", "qk_nope_head_dim"),
)
# Scaled as the hidden size is.
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
_CHOSEN_EXPERTS = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
)
# What a state space is wider than the residual stream by, its heads, and the size of each.
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


class NotReducibleError(Exception):
    """There is no small model of this architecture; the text says why."""


@dataclass(frozen=True)
class ModelDivision:
    """How a layout divides a model, and the smaller one in which it is to be divided likewise.

    Attributes:
        stages: Of the pipeline, each of which needs a block.
        tensor: Ranks that share each layer.
        before: Ranks that share each layer of the model that is not small.
    """

    stages: int = 1
    tensor: int = 1
    before: int = 1


def reduce_model(config: HuggingFaceConfig, division: ModelDivision) -> HuggingFaceConfig:
    """Return a configuration of a small model of the same architecture, with random weights.

    Raises:
        ConfigError: The architecture can't be described.
        NotReducibleError: transformers refuses the small one's figures.
    """
    typed = architecture(config)
    small = replace(config, init="random", weights=None)
    figures = dict(_figures(typed, division))
    replaced = canonical(figures, typed)
    overrides = {
        k: v for k, v in config.config.items() if not canonical({k: v}, typed).keys() & replaced
    }
    small = replace(small, config={**overrides, **figures})
    try:
        architecture(small)
    except ConfigError as error:
        raise NotReducibleError(error.problems[0].message) from error
    return small


def vocabulary(small: HuggingFaceConfig) -> int:
    """Return how many tokens a small model knows.

    Raises:
        NotReducibleError: Its configuration does not say.
    """
    size = _number(architecture(small), "vocab_size")
    if size is None:
        raise NotReducibleError("its configuration has no vocab_size")
    return size


def identity(small: HuggingFaceConfig) -> dict[str, Any]:
    """Return all that a small model's computation depends on beside the installed packages."""
    content = architecture(small).to_dict()
    del content["transformers_version"]
    content.pop("_name_or_path", None)
    code = {}
    if small.trust_remote_code and (where := files.folder(small)) is not None:
        code = {file.name: file.read_text() for file in sorted(where.glob("*.py"))}
    return {"config": content, "attention": small.attention, "code": code}


def refuse_unlike(config: HuggingFaceConfig, small: HuggingFaceConfig) -> int:
    """Return the parameters of a small model that has all that the other one consists of.

    Raises:
        ConfigError: The architecture can't be built.
        NotReducibleError: It is large, or consists of other parts.
    """
    before = structure(config)
    try:
        after = structure(small)
    except ConfigError as error:
        raise NotReducibleError(error.problems[0].message) from error
    count = sum(parameter.numel() for parameter in after.model.parameters())
    if count > LARGEST:
        raise NotReducibleError(
            f"what it has besides blocks, heads and experts is large: with few of those it has "
            f"{count / 1e6:.0f}M parameters"
        )
    for what, whole, other in (
        ("parts", _parts(before.model), _parts(after.model)),
        ("kinds of blocks", set(before.kinds), set(after.kinds)),
        ("tied weights", _wild(before.ties), _wild(after.ties)),
    ):
        if different := sorted(whole ^ other):
            raise NotReducibleError(
                f"with few blocks its {what} differ: {', '.join(different[:3])}"
            )
    return count


def _parts(model: nn.Module) -> set[str]:
    """Return the names of all modules and parameters, without the numbers of blocks, and kinds."""
    modules = {
        f"{name} ({type(module).__name__})" for name, module in model.named_modules() if name
    }
    return _wild(modules) | _wild(dict(model.named_parameters()))


def _wild(names: Mapping[str, Any] | set[str]) -> set[str]:
    return {re.sub(r"\.\d+(?=[. ]|$)", ".*", name) for name in names}


def _figures(typed: Any, division: ModelDivision) -> Iterator[tuple[str, Any]]:
    """Yield keys of a configuration and the values that make its model small."""
    yield from _blocks(typed, division.stages)
    for queries in _HEADS:
        if _number(typed, queries) is not None:
            few, few_shared = _heads(typed, queries, division)
            yield queries, few
            yield from ((name, few_shared) for name in _HEADS[queries] if _number(typed, name))
    hidden, small = _hidden(typed, division)
    yield "hidden_size", small
    for name in _WIDTHS:
        if (present := _number(typed, name)) is not None and present > 0:
            width = min(present * small / hidden, _WIDEST * small)
            yield name, _rounded(width, 8 * division.tensor)
    yield from _head_figures(typed, division)
    yield from _state_figures(typed, small)
    yield from _expert_figures(typed)
    yield from _token_figures(typed, division)
    for name in _WINDOWS:
        if _number(typed, name) is not None:
            yield name, _WINDOW


def _hidden(typed: Any, division: ModelDivision) -> tuple[int, int]:
    """Return the width of the residual stream, and that of the small model."""
    hidden = _number(typed, "hidden_size") or 1
    count = _number(typed, "num_attention_heads")
    if count is None:
        return hidden, _HIDDEN
    few, _ = _heads(typed, "num_attention_heads", division)
    size = _number(typed, "head_dim")
    if size is None:  # a head's size follows from this one
        return hidden, few * _head_size(few)
    width = few * _head_size(few) / (count * size)
    return hidden, _rounded(hidden * width, math.lcm(few, 8 * division.tensor))


def _token_figures(typed: Any, division: ModelDivision) -> Iterator[tuple[str, Any]]:
    vocabulary = _number(typed, "vocab_size") or 1
    tokens = _TOKENS * division.tensor + (1 if vocabulary % division.before else 0)
    for name in _VOCABULARIES:
        if _number(typed, name) is not None:
            yield name, tokens
    for field in fields(typed):
        token = _read(typed, field.name) if field.name.endswith("_token_id") else None
        if isinstance(token, int) and token >= tokens:
            yield field.name, 0
        elif isinstance(token, list):
            yield field.name, [0]


def _state_figures(typed: Any, hidden: int) -> Iterator[tuple[str, Any]]:
    """Yield what a state space has, whose heads together are as wide as it is."""
    for expand, heads, size in _STATE_SPACES:
        factor = _number(typed, expand)
        if factor is not None and _number(typed, heads) is not None:
            yield heads, 4
            yield size, factor * hidden // 4
    for name, figure in _STATE_SIZES.items():
        if (present := _number(typed, name)) is not None:
            yield name, min(present, figure)


def _head_figures(typed: Any, division: ModelDivision) -> Iterator[tuple[str, Any]]:
    few, _ = _heads(typed, "num_attention_heads", division)
    is_latent = _number(typed, "qk_rope_head_dim") is not None
    for name in _HEAD_SIZES:
        if _number(typed, name) is not None and not (is_latent and name == "head_dim"):
            yield name, _head_size(few)
    if is_latent:
        yield "qk_rope_head_dim", _head_size(few) // 2
        is_even = _number(typed, "v_head_dim") == _number(typed, "qk_nope_head_dim")
        yield "v_head_dim", _head_size(few) if is_even else 12
    for name in _RANKS:
        if _number(typed, name) is not None:
            yield name, _HEAD_SIZE if name == "kv_lora_rank" else 24
    if (rotary := _number(typed, "rotary_dim")) is not None:
        size = (_number(typed, "hidden_size") or 1) // (_number(typed, "num_attention_heads") or 1)
        yield "rotary_dim", max(2, _head_size(few) * rotary // max(1, size) // 2 * 2)


def _expert_figures(typed: Any) -> Iterator[tuple[str, Any]]:
    for name in _NUMBERS_OF_EXPERTS:
        if (present := _number(typed, name)) is not None:
            yield name, min(present, _EXPERTS)
    for name in _CHOSEN_EXPERTS:
        if (present := _number(typed, name)) is not None:
            yield name, min(present, 2)
    groups, chosen = _number(typed, "n_group"), _number(typed, "topk_group")
    if groups is not None and chosen is not None:
        yield "n_group", min(groups, 2)
        yield "topk_group", 1 if chosen < groups else min(groups, 2)


def _heads(typed: Any, queries: str, division: ModelDivision) -> tuple[int, int]:
    """Return fewer heads in the same ratio, that the layout divides as it divides those."""
    count = _number(typed, queries) or 1
    keys = next(filter(None, (_number(typed, name) for name in _HEADS[queries])), count)
    group = max(1, count // keys)
    if keys < division.before:  # each is held by several ranks
        few = max(1, division.tensor * keys // division.before)
    else:
        few = min(keys, max(2, division.tensor))
    return few * group, few


def _head_size(heads: int) -> int:
    return _HEAD_SIZE if heads <= _HEAD_SIZE else _HEAD_SIZE // 2


def _blocks(typed: Any, stages: int) -> Iterator[tuple[str, Any]]:
    """Yield the number of blocks, and the entries that lists have for those that are chosen."""
    depth = _number(typed, "num_hidden_layers") or 0
    lists = {
        field.name: list(present)
        for field in fields(typed)
        if isinstance(present := _read(typed, field.name), list | tuple)
        and len(present) == depth > 1
    }
    least = max(2, stages)
    for name in _PERIODS:
        least = max(least, min(_number(typed, name) or 0, _MOST_BLOCKS))
    for name in _DENSE_FIRST:
        if (present := _number(typed, name)) is not None and 0 < present < depth:
            yield name, 1
    chosen = _chosen([str([values[n] for values in lists.values()]) for n in range(depth)], least)
    if len(chosen) >= depth:
        return
    yield "num_hidden_layers", len(chosen)
    for name, present in lists.items():
        yield name, [present[number] for number in chosen]


def _chosen(kinds: list[str], least: int) -> list[int]:
    """Return the numbers of the first block of each kind, and of the next until they suffice."""
    first = {kind: number for number, kind in reversed([*enumerate(kinds)])}
    chosen = set(first.values())
    others = [number for number in range(len(kinds)) if number not in chosen]
    return sorted(chosen | set(others[: max(0, least - len(chosen))]))


def _rounded(value: float, multiple: int) -> int:
    return max(multiple, round(value / multiple) * multiple)


def _number(typed: Any, name: str) -> int | None:
    """Return a figure that a configuration has and that can be set; None where there is none."""
    known = {field.name for field in fields(typed)}
    own = getattr(typed, "attribute_map", {}).get(name, name)
    if own not in known and name not in known:
        return None
    value = _read(typed, own if own in known else name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read(typed: Any, name: str) -> Any:
    try:
        return getattr(typed, name, None)
    except Exception:  # some classes refuse to name one value where blocks differ
        return None
