"""The attention of transformers' models whose sequences are divided over ranks.

It joins transformers' registry of attention functions under a name of its own. What a rank computes
is what the function that was chosen before would compute for the rank's positions: the mask is that
of the model, built from its own mask functions at the positions of this part, so that windows and
chunks hold. What it is not offered, a model that attends by itself, ``sequence_mixing`` reports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.models.attention import SequenceParts
from axonlaunch.models.hf import library

NAME = "axonlaunch_divided"
"""In transformers' registries, and of the attribute of a configuration that says how."""


@dataclass(frozen=True)
class _Division:
    """How attention is divided, and what it is that is divided.

    Attributes:
        parts: Of sequences.
        chosen: The function that attended before, by its name.
        needs_mask: Whether attention without a mask is refused.
    """

    parts: SequenceParts
    chosen: str
    needs_mask: bool


def divide_attention(model: Any, parts: SequenceParts, *, needs_mask: bool = False) -> None:
    """Let a model, or a stage of one, compute on parts of sequences, in place.

    Args:
        model: One of its own, whose configuration nobody else has.
        parts: How a rank reaches the others.
        needs_mask: Whether attention without a mask is refused, by who looks for it.
    """
    library.register_attention(NAME, attend=attend, mask=mask)
    model._part_positions = parts.positions
    model._whole_positions = lambda part: parts.gather(part[:, None, :, None])[:, 0, :, 0]
    for config in {id(each): each for each in map(_config, model.modules()) if each}.values():
        chosen = library.attention_kernel(config)
        if chosen != NAME:
            object.__setattr__(config, NAME, _Division(parts, chosen, needs_mask))
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
    """Return what a part's tokens may attend to, [B, 1, part, whole]; None: all before them.

    Of rows that hold several documents, those of a token's own.

    Args:
        batch_size: Samples.
        q_length: Tokens of the part.
        mask_function: Sample, head, position and other position to whether one sees the other.
        config: The model's.
        dtype: Of an additive mask.
        device: Where it is needed.
        attention_mask: Of padding.
        local_size: A window or a chunk.
        allow_is_causal_skip: Whether the function is causal but for ``local_size``.

    Raises:
        ValueError: Samples are padded.
    """
    if attention_mask is not None and not library.hides_nothing(attention_mask):
        raise ValueError("a padded sequence can't be divided over ranks")
    division: _Division = getattr(config, NAME)
    whole = q_length * division.parts.ranks
    positions = library.document_positions()
    is_causal = allow_is_causal_skip and (local_size is None or whole <= local_size)
    if is_causal and division.chosen == "sdpa" and positions is None:
        return None
    with division.parts.around():
        here = division.parts.positions(q_length).to(device)[None, None, :, None]
        there = torch.arange(whole, device=device)[None, None, None, :]
        sample = torch.arange(batch_size, device=device)[:, None, None, None]
        head = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
        seen = mask_function(sample, head, here, there).expand(batch_size, -1, q_length, whole)
        if positions is not None:
            documents = (positions == 0).cumsum(-1)
            seen = seen & (documents[sample, here] == documents[sample, there])
        if division.chosen == "sdpa":
            return seen
        return torch.zeros((), dtype=dtype, device=device).where(seen, torch.finfo(dtype).min)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend from a part's queries [B, heads, tokens, head_dim] to the whole sequence.

    Without a mask it is a ring, in which no rank holds more than two parts; with one, which a ring
    does not take, keys and values are gathered and the function that was chosen does the rest.

    Returns:
        [B, tokens, heads, head_dim], and probabilities if the function gives them.

    Raises:
        ValueError: The mask is not what ``mask`` returned.
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
        raise ValueError(f"{type(module).__name__} attends without a mask of transformers'")
    parts, length = division.parts, query.shape[2]
    whole = length * parts.ranks
    if attention_mask is None:
        if division.chosen == "sdpa" and _fits_a_ring(module, key, value, options):
            usual, scaling = query.shape[-1] ** -0.5, options.get("scaling")
            if scaling is not None and scaling != usual:
                query = query * (scaling / usual)
            return parts.attend(query, key, value).transpose(1, 2).contiguous(), None
        if _is_causal(module, options):
            here = parts.positions(length).to(query.device)
            attention_mask = (torch.arange(whole, device=query.device) <= here[:, None])[None, None]
    elif attention_mask.shape[-2:] != (length, whole):
        shape = tuple(attention_mask.shape)
        raise ValueError(f"{type(module).__name__} attends by a mask {shape} of its own")
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
    """Return the attention that a model's own file computes step by step."""
    for cls in type(module).__mro__:
        if function := getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None):
            return function
    raise NotImplementedError(f"{type(module).__name__} has no eager_attention_forward")


def _config(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    return config if library.has_attention_kernel(config) else None
