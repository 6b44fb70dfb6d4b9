"""Checks whether a transformers model can compute on parts of hidden states, by running it so.

Under sequence parallelism tensor ranks get full rows of tokens. Embeddings return this rank's part
of the sequence, norms and residuals compute on it, and regions gather it and return a part again.
The model is run on fake tensors with hooks that do the same. Operations between regions that mix
tokens, count positions or reshape to the size of full rows are reported. Effects that depend on
values are not detected; ``axonlaunch verify`` compares values.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.models.fake.fake_tensor_cache import fake_tensor_mode, silence_fake_tensors
from axonlaunch.models.hf.analysis.sequence_mixing import (
    MixingError,
    MixingWatch,
    finds_positions_in_tokens,
    part_length,
)
from axonlaunch.models.hf.analysis.tensor_plans import module_styles
from axonlaunch.models.hf.build import split_hidden_states
from axonlaunch.models.modules.convert_module import first_argument
from axonlaunch.models.tensors.initialization import materialize

_PARTS = 2
_NDIM = 3
"""Number of dimensions of hidden states: samples, tokens, features."""
_GATHERS = ("column", "column_gathered", "packed_column", "key_value")
_WITH_FULL_SEQUENCES = ("region", "full_sequence")
_SUMS = ("row", "row_split")


def why_unsplittable(model: Any, *, layers: str) -> str:
    """Return why tensor ranks can't each have a part of the hidden states; empty if they can.

    Args:
        model: Unsharded model without storage; it is not changed.
        layers: Path of the list of blocks.
    """
    styles = module_styles(model, layers)
    if unsharded := _unsharded_end(model, styles):
        return f"its tensor plan does not shard {unsharded}"
    inside = tuple(f"{name}." for name, style in styles.items() if style in _WITH_FULL_SEQUENCES)
    for name, style in styles.items():
        if style == "experts" and not name.startswith(inside):
            return f"no module around {name} can gather the sequence"
    unchanged, model = copy.deepcopy(model), copy.deepcopy(model)
    silence_fake_tensors()
    watch = MixingWatch(
        part_length(model, parts=_PARTS),
        instead_of="layers that get full sequences",
        everywhere=True,
    )
    watch.follow_blocks(model, layers)
    _exchange_parts(model, styles, watch)
    split_hidden_states(model)
    try:
        with fake_tensor_mode():
            materialize(model, device="cpu")
            with watch:
                model(torch.zeros((1, watch.length * _PARTS), dtype=torch.int64))
    except MixingError as reason:
        return str(reason)
    except Exception as error:  # third-party code may fail in any way
        details = " ".join(str(error).split())[:200]
        return f"running it on parts of them fails ({type(error).__name__}: {details})"
    with fake_tensor_mode():
        materialize(unchanged, device="cpu")
    if finds_positions_in_tokens(unchanged, watch.length):
        return "it computes positions from the tokens, counting those that are not padding"
    return ""


def _unsharded_end(model: Any, styles: Mapping[str, str]) -> str:
    """Return the name of the embedding or head, if it is not sharded; empty if both are."""
    modules = dict(model.named_modules())
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        name = next((name for name, module in modules.items() if module is end), "")
        if styles.get(name) != "vocabulary":
            return name or "an embedding and a head"
    return ""


def _exchange_parts(model: nn.Module, styles: Mapping[str, str], watch: MixingWatch) -> None:
    """Let hooks gather hidden states and cut results as sharded modules do."""
    full = tuple(f"{name}." for name, style in styles.items() if style == "full_sequence")
    regions = tuple(f"{name}." for name, style in styles.items() if style == "region")
    for name, module in model.named_modules():
        style = styles.get(name)
        if name.startswith(full):
            continue
        is_embedding = style in ("vocabulary", "sequence") and isinstance(module, nn.Embedding)
        is_head = style == "vocabulary" and not is_embedding
        gathers = style in _GATHERS and not name.startswith(regions)
        if gathers or style in ("region", "full_sequence") or is_head:
            module.register_forward_pre_hook(_gather(name, watch), with_kwargs=True)
        elif style == "sequence" and not is_embedding:
            module.register_forward_pre_hook(_expect_part(name, watch))
        if style in _SUMS or is_embedding:
            module.register_forward_hook(_cut(name, watch))
        elif style == "full_sequence":
            module.register_forward_hook(_cut(name, watch, may_be_flat=True))


def _gather(name: str, watch: MixingWatch) -> Any:
    def gather(module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = None if args else first_argument(module)
        if key is not None and key not in kwargs:
            raise MixingError(f"{name} gets no {key}")
        part = kwargs[key] if key else args[0]
        if part.ndim != _NDIM or part.shape[1] != watch.length:
            raise MixingError(f"{name} gets {list(part.shape)}, not [1, {watch.length}, features]")
        with watch.pause():
            full = torch.cat([part] * _PARTS, 1)
        return (args, {**kwargs, key: full}) if key else ((full, *args[1:]), kwargs)

    return gather


def _cut(name: str, watch: MixingWatch, *, may_be_flat: bool = False) -> Any:
    """Return a hook that cuts hidden states, which are one sample here."""

    def cut(module: nn.Module, args: Any, output: Any) -> Any:
        del module, args
        hidden, *others = output if isinstance(output, tuple) else (output,)
        is_flat = may_be_flat and hidden.ndim < _NDIM
        dim = 0 if is_flat else 1
        if hidden.ndim != _NDIM - is_flat or hidden.shape[dim] != watch.length * _PARTS:
            full = f"[1, {watch.length * _PARTS}, features]"
            raise MixingError(f"{name} returns {list(hidden.shape)}, not {full}")
        with watch.pause():
            part = hidden.chunk(_PARTS, dim)[0].clone()
        return (part, *others) if isinstance(output, tuple) else part

    return cut


def _expect_part(name: str, watch: MixingWatch) -> Any:
    def expect(module: nn.Module, args: Any) -> None:
        del module
        first = next((value for value in args if isinstance(value, Tensor)), None)
        if first is not None and watch.length not in first.shape:
            raise MixingError(f"{name} does not get a part of the sequence, but all of it")

    return expect
