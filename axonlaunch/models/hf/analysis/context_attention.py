"""Attention of transformers models with sequences that are split over ranks.

It is registered in transformers' registry of attention functions. A rank computes the same as the
previously selected function would compute for the rank's positions. The mask is built from the
model's mask functions at the positions of this part, so windows and chunks stay correct. Models
that don't use the registry are reported by ``sequence_mixing``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.models.hf.reading import library
from axonlaunch.models.modules.attention import SequenceParts

NAME = "axonlaunch_context"
"""Name in transformers' registries, and of the configuration attribute with the ``_Division``."""


@dataclass(frozen=True)
class _Division:
    """How a model's sequences are split.

    Attributes:
        parts: Functions for parts of sequences.
        chosen: Name of the previously selected attention function.
        needs_mask: Whether attention without a mask is an error.
    """

    parts: SequenceParts
    chosen: str
    needs_mask: bool


def shard_attention(model: Any, parts: SequenceParts, *, needs_mask: bool = False) -> None:
    """Make a model or pipeline stage compute on parts of sequences, in place.

    Args:
        model: Model with a configuration that no other model uses.
        parts: Functions for parts of sequences.
        needs_mask: Whether attention without a mask is an error; used by ``sequence_mixing``.
    """
    library.register_attention(NAME, attend=attend, mask=mask)
    model._part_positions = parts.positions
    model._whole_positions = lambda part: parts.gather(part[:, None, :, None])[:, 0, :, 0]
    for config in {
        id(config): config for config in map(_config, model.modules()) if config
    }.values():
        kernel = library.attention_kernel(config)
        if kernel != NAME:
            object.__setattr__(config, NAME, _Division(parts, kernel, needs_mask))
            library.replace_attention_kernel(config, NAME)


def mask(
    *,
    batch_size: int,
    q_length: int,
    mask_function: Callable[..., Tensor],
    config: Any,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> Tensor | None:
    """Return the mask from this rank's part of the queries to the full sequence.

    transformers calls it with these arguments. In rows that hold several documents, a token
    attends only to its document.

    Args:
        batch_size: Number of samples, B.
        q_length: Number of tokens in this rank's part.
        mask_function: Maps sample, head, query position and key position to whether the query
            attends to the key.
        config: Configuration of the model.
        dtype: Dtype of an additive mask.
        device: Device of the mask.
        attention_mask: Padding mask.
        local_size: Size of a window or chunk.
        allow_is_causal_skip: Whether the function is causal except for ``local_size``.

    Returns:
        The mask [B, 1, tokens of the part, tokens of the sequence]; None if attention is causal,
        which needs no mask.

    Raises:
        ValueError: Samples are padded.
    """
    if attention_mask is not None and not library.hides_nothing(attention_mask):
        raise ValueError("a padded sequence can't be split over ranks")
    division: _Division = getattr(config, NAME)
    q_length = library.row_length(q_length)
    full_length = q_length * division.parts.ranks
    positions = library.document_positions()
    is_causal = allow_is_causal_skip and (local_size is None or full_length <= local_size)
    if is_causal and division.chosen == "sdpa" and positions is None:
        return None
    with division.parts.around():
        query_positions = division.parts.positions(q_length).to(device)[None, None, :, None]
        key_positions = torch.arange(full_length, device=device)[None, None, None, :]
        sample = torch.arange(batch_size, device=device)[:, None, None, None]
        head = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
        is_visible = mask_function(sample, head, query_positions, key_positions).expand(
            batch_size, -1, q_length, full_length
        )
        if positions is not None:
            documents = (positions == 0).cumsum(-1)
            is_visible = is_visible & (
                documents[sample, query_positions] == documents[sample, key_positions]
            )
        if division.chosen == "sdpa":
            return is_visible
        return torch.zeros((), dtype=dtype, device=device).where(is_visible, torch.finfo(dtype).min)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention from a part's queries [B, heads, tokens, head_dim] to the full sequence.

    Without a mask, ring attention is used, in which no rank holds more than two parts. Ring
    attention does not support masks, so with a mask keys and values are gathered and passed to the
    previously selected function.

    Returns:
        [B, tokens, heads, head_dim], and the probabilities if the function returns them.

    Raises:
        ValueError: The mask is not a result of ``mask``.
    """
    division: _Division = getattr(module.config, NAME)
    with division.parts.around():
        return _attend(division, module, query, key, value, attention_mask, options)


def _attend(
    division: _Division,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    if division.needs_mask and attention_mask is None:
        raise ValueError(f"{type(module).__name__} attends without a mask from transformers")
    parts, length = division.parts, query.shape[2]
    full_length = length * parts.ranks
    if attention_mask is None:
        if division.chosen == "sdpa" and _fits_a_ring(module, key, value, options):
            default_scale, scaling = query.shape[-1] ** -0.5, options.get("scaling")
            if scaling is not None and scaling != default_scale:
                query = query * (scaling / default_scale)
            return parts.attend(query, key, value).transpose(1, 2).contiguous(), None
        if _is_causal(module, options):
            positions = parts.positions(length).to(query.device)
            attention_mask = (torch.arange(full_length, device=query.device) <= positions[:, None])[
                None, None
            ]
    elif attention_mask.shape[-2:] != (length, full_length):
        shape = tuple(attention_mask.shape)
        raise ValueError(f"{type(module).__name__} attends with a custom mask {shape}")
    inner = library.attention_function(division.chosen) or _eager(module)
    outputs: tuple[Tensor, Tensor | None] = inner(
        module, query, parts.gather(key), parts.gather(value), attention_mask, **options
    )
    return outputs


def _fits_a_ring(module: nn.Module, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    return (
        _is_causal(module, options)
        and key.shape[-1] == value.shape[-1]
        and not options.get("dropout")
        and options.get("position_bias") is None
    )


def _is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    causal = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if causal is None else causal)


def _eager(module: nn.Module) -> Any:
    """Return the attention function that the model's source file defines."""
    for cls in type(module).__mro__:
        if function := getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None):
            return function
    raise NotImplementedError(f"{type(module).__name__} has no eager_attention_forward")


def _config(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    return config if library.has_attention_kernel(config) else None
