"""Self-attention and the rotary positions that it may use.

It holds what the transformers here share; it knows neither padding nor caches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class SequenceParts:
    """How a rank computes on its part of every sequence, and reaches the others.

    Attributes:
        positions: Tokens of a part to their positions in the whole sequence, [tokens] int64.
        gather: A part's keys or values [B, heads, tokens, head_dim] to those of the whole sequence,
            in order; gradients are summed back into the parts.
        attend: Queries, keys and values of a part, each [B, heads, tokens, head_dim], to what
            causal attention over the whole with a scale of 1 / sqrt(head_dim) gives.
        ranks: Parts of a sequence.
        around: Surrounds all of that, for who watches the rest.
    """

    positions: Callable[[int], Tensor]
    gather: Callable[[Tensor], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ranks: int
    around: Callable[[], AbstractContextManager[None]] = nullcontext


class Packing(NamedTuple):
    """Where documents lie in rows that hold several, none of which attends to another.

    Attributes:
        positions: Of each token in its document, [B, T] int64.
        mask: Whether a token attends to another, [B, 1, T, T] bool; where a rank has a part of
            each row, its tokens to all of the row, [B, 1, T / ranks, T].
    """

    positions: Tensor
    mask: Tensor

    @classmethod
    def of(cls, positions: Tensor | None) -> Packing | None:
        """Find documents, which begin where positions are 0; None: rows hold one sequence each."""
        if positions is None:
            return None
        places = torch.arange(positions.shape[1], device=positions.device)
        return cls.of_part(positions, positions, places)

    @classmethod
    def of_part(cls, positions: Tensor, whole: Tensor, places: Tensor) -> Packing:
        """Find the documents of parts of rows.

        Args:
            positions: Of a part's tokens in their documents, [B, tokens].
            whole: Of all tokens of the rows, [B, T].
            places: Where the part's tokens stand in the rows, [tokens].
        """
        documents = (whole == 0).cumsum(1)
        same = documents[:, None, places, None] == documents[:, None, None, :]
        earlier = places[:, None] >= torch.arange(whole.shape[1], device=whole.device)
        return cls(positions, same & earlier)


def refuses_groups_on_cuda(q: Tensor, mask: Tensor | None) -> bool:
    """Return whether a fused kernel of CUDA's refuses keys and values of fewer heads than queries.

    torch then falls back in silence to one that holds all scores: 8 GiB a sample and layer for 32
    heads and 8,192 tokens in fp32. Flash takes no fp32 and no mask, memory-efficient no groups, and
    cuDNN, which takes a mask, is not the first choice before Hopper.

    Source: PyTorch, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``.
    """
    return q.dtype == torch.float32 or mask is not None


def refuses_groups(q: Tensor, mask: Tensor | None) -> bool:
    """Return whether keys and values have to be repeated for the queries of a group.

    A CPU's kernel is as fast or faster with groups, and there are no copies of them.
    """
    return q.device.type == "cuda" and refuses_groups_on_cuda(q, mask)


class Rotary:
    """Cosines and sines of positions, each [T, 1, head_dim], or [B, T, 1, head_dim].

    Both halves of a head have the same angles; the first half of the sines has its sign turned.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin

    def turn(self, x: Tensor) -> Tensor:
        """Turn [B, T, heads, head_dim] by its positions; halves pair up as in Hugging Face."""
        # (first, second) to (first cos - second sin, second cos + first sin): in whole heads, for a
        # GPU that runs op by op is short of launches here rather than of arithmetic.
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        turned: Tensor = x * self.cos + swapped * self.sin
        return turned.to(x.dtype)  # the fp32 tables have lifted bf16 to fp32


class RotaryTable(nn.Module):
    """Cosines and sines of rotary positions (Su et al., RoFormer, 2021).

    The tables follow from the configuration, so they are not saved; ``reset_buffers`` fills them.
    Blocks are passed the table itself: FSDP's mixed precision would cast tensors that a block is
    passed, and in bf16 the angles of far positions blur.
    """

    cos: Tensor
    sin: Tensor
    positions: Callable[[int], Tensor] | None = None
    """What positions the values of a part of a sequence have, by their number; None: 0 and on."""

    def __init__(self, head_dim: int, *, max_positions: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        for name in ("cos", "sin"):
            table = torch.empty(max_positions, head_dim)
            self.register_buffer(name, table, persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the tables where they are, after ``to_empty`` has left them without values."""
        # float64, because at position 100000 an fp32 angle is off by 0.004.
        arange = partial(torch.arange, device=self.cos.device, dtype=torch.float64)
        frequencies = self.theta ** (-arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(arange(len(self.cos)), frequencies)
        with torch.no_grad():
            self.cos.copy_(angles.cos().repeat(1, 2))
            self.sin.copy_(torch.cat((-angles.sin(), angles.sin()), dim=1))

    def forward(self, length: int, positions: Tensor | None = None) -> Rotary:
        """Return what turns ``length`` values, at positions 0 and on unless others are given."""
        if positions is not None:
            return Rotary(self.cos[positions][:, :, None], self.sin[positions][:, :, None])
        if self.positions is None:
            return Rotary(self.cos[:length, None], self.sin[:length, None])
        at = self.positions(length).to(self.cos.device)
        return Rotary(self.cos[at, None], self.sin[at, None])


class Attention(nn.Module):
    """Multi-head attention with separate projections and, at will, fewer key-value heads.

    How many heads and positions there are is read from what the projections return, so a
    tensor-parallel rank that holds some of the heads runs this code unchanged.

    Attributes:
        num_heads: Query heads of the whole layer.
        num_key_value_heads: Key-value heads of the whole layer.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_key_value_heads: int | None = None,
        bias: bool = False,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads: Final = num_heads
        self.num_key_value_heads: Final = num_key_value_heads or num_heads
        self.head_dim: Final = hidden_size // num_heads
        self.causal: Final = causal
        key_value_size = self.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, key_value_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, key_value_size, bias=bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(
        self, x: Tensor, rotary: RotaryTable | None = None, packing: Packing | None = None
    ) -> Tensor:
        """Attend: [B, T, hidden] to [B, T, hidden]; in packed rows inside of documents."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rotary is not None:
            # Here, because under sequence parallelism the blocks see a part of the positions.
            positions = rotary(q.shape[1], None if packing is None else packing.positions)
            q, k = positions.turn(q), positions.turn(k)
        heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        attended = self.attend(*heads) if packing is None else self.attend(*heads, packing.mask)
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix values by queries and keys; engines may put another function here.

        Args:
            q: Queries [B, heads, T, head_dim].
            k: Keys [B, key_value_heads, T, head_dim]; their number divides that of ``q``.
            v: Values, as ``k``.
            mask: [B, 1, T, T] bool, where a query may see a key; None: causal, if the model is.

        Returns:
            [B, heads, T, head_dim].
        """
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and refuses_groups(q, mask):
            k, v = (heads.repeat_interleave(groups, dim=1) for heads in (k, v))
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            enable_gqa=k.shape[1] != q.shape[1],
        )
