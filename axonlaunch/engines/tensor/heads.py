"""Heads of attention under a cut: how many a rank has, and what a module remembers of them.

A module that writes ``view(batch, -1, self.num_heads, d)`` would take a rank's part of the heads
for a part of the positions, without an error. So whatever a module that holds column-parallel
layers keeps of heads and widths follows the cut. Heads that can't be dealt out are reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from axonlaunch.config.errors import divisors, one_of
from axonlaunch.engines.tensor.kinds import linear_sizes
from axonlaunch.models.attention import Attention

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_GROUPS = ("num_key_value_groups",)
"""Query heads for each key-value head."""
_WIDTHS = (
    *("embed_dim", "split_size", "all_head_size", "hidden_size", "attn_hidden_size", "d_model"),
    *("inner_dim", "intermediate_size", "intermediate_dim", "expert_dim", "ffn_dim"),
)
"""What modules call the number of a layer's outputs; one that is equal to it follows the cut."""


def key_value_heads(holder: nn.Module | None, layer: nn.Module) -> int | None:
    """Return how many heads of keys or values a layer of an attention module gives.

    Args:
        holder: The attention module.
        layer: Linear.

    Returns:
        None where the module does not say how large a head is.
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
    """Yield the head counts of a module that a degree can't deal out, with the degrees that can.

    Args:
        holder: What holds column-parallel layers.
        columns: Those of them that are cut, by their names in it.
        degree: Ranks.
        shared: Heads of keys and values that several ranks may hold alike; None: none may.
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
        legal = [n for n in divisors(heads) if shared is None or _fits(shared, n)]
        if degree not in legal:
            yield f"{name}={heads} can't be dealt out to so many ranks; use {one_of(legal)}"
            return


def follow_the_cut(
    holder: nn.Module, outputs: Sequence[int], *, degree: int, shared: int | None
) -> None:
    """Make what a module keeps of heads and widths that of a rank.

    Args:
        holder: What holds column-parallel layers.
        outputs: How many outputs they, or the pieces that they pack, have over all ranks.
        degree: Ranks.
        shared: As for ``indivisible_heads``.
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
