"""Adjusts head counts and widths stored in modules when their layers are sharded.

A module that computes ``view(batch, -1, self.num_heads, d)`` with the full number of heads would
silently treat a part of the heads as a part of the positions. Therefore head counts and widths
stored in modules with column-parallel layers are set to this rank's. Head counts that cannot be
divided among the ranks are reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from axonlaunch.config.problems.errors import divisors, one_of
from axonlaunch.engines.tensor.parallel_layers.layer_detection import linear_sizes
from axonlaunch.models.modules.attention import Attention

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_GROUPS = ("num_key_value_groups",)
"""Number of query heads per key-value head."""
_WIDTHS = (
    *("embed_dim", "split_size", "all_head_size", "hidden_size", "attn_hidden_size", "d_model"),
    *("inner_dim", "intermediate_size", "intermediate_dim", "expert_dim", "ffn_dim"),
)
"""Common attribute names for a layer's output size; changed if equal to a sharded output size."""


def key_value_heads(holder: nn.Module | None, layer: nn.Module) -> int | None:
    """Return the number of key or value heads that a layer of an attention module computes.

    Args:
        holder: The attention module.
        layer: The linear layer.

    Returns:
        The number of heads; None if the module does not state the size of a head.
    """
    sizes = linear_sizes(layer)
    if holder is None or sizes is None:
        return None
    width = getattr(holder, "head_dim", None)
    if any(layer is getattr(holder, name, None) for name in ("v_proj", "value")):
        width = getattr(holder, "v_head_dim", width)
    if not isinstance(width, int) or width < 1 or sizes.outputs % width:
        return None
    return sizes.outputs // width


def indivisible_heads(
    holder: nn.Module, columns: Mapping[str, nn.Module], degree: int, *, shared: int | None
) -> Iterator[str]:
    """Yield an error message if a module's heads cannot be sharded over ``degree`` ranks.

    Args:
        holder: The module that holds column-parallel layers.
        columns: The sharded layers, by attribute name.
        degree: Number of ranks.
        shared: Number of key-value heads that several ranks may share; None if none may.
    """
    if isinstance(holder, Attention):
        return
    counts = {name: heads for name, heads in _counts(holder, _HEADS) if heads > 1}
    if shared is None:
        counts |= {name: heads for name, heads in _counts(holder, _KEY_VALUE_HEADS) if heads > 1}
    if not counts:
        heads_of = {name: key_value_heads(holder, layer) for name, layer in columns.items()}
        heads_of = {n: heads for n, heads in heads_of.items() if shared is None or heads != shared}
        counts = {f"heads of {name}": heads for name, heads in heads_of.items() if heads}
    for name, heads in counts.items():
        valid = [n for n in divisors(heads) if shared is None or _fits(shared, n)]
        if degree not in valid:
            yield f"{name}={heads} cannot be sharded over {degree} ranks; use {one_of(valid)}"
            return


def set_local_head_counts(
    holder: nn.Module, outputs: Sequence[int], *, degree: int, shared: int | None
) -> None:
    """Set the head counts and widths stored in a module to those of one rank.

    Args:
        holder: The module that holds column-parallel layers.
        outputs: Full output sizes of those layers, or of the pieces packed in them.
        degree: Number of ranks.
        shared: Number of key-value heads that several ranks may share; None if none may.
    """
    if isinstance(holder, Attention):
        return
    for name, heads in _counts(holder, _HEADS):
        setattr(holder, name, max(1, heads // degree))
    for name, heads in _counts(holder, _KEY_VALUE_HEADS):
        setattr(holder, name, max(1, heads // degree))
    if shared is not None and shared < degree:
        for name, groups in _counts(holder, _GROUPS):
            setattr(holder, name, groups * shared // degree)
    for name, width in _counts(holder, _WIDTHS):
        if width in outputs:
            setattr(holder, name, width // degree)


def _fits(heads: int, degree: int) -> bool:
    return heads % degree == 0 or degree % heads == 0


def _counts(holder: nn.Module, names: Sequence[str]) -> list[tuple[str, int]]:
    attributes = [(name, holder.__dict__.get(name)) for name in names]
    return [(name, n) for name, n in attributes if isinstance(n, int) and not isinstance(n, bool)]
