"""Self-attention and rotary positions, shared by this package's transformers.

Padding and key-value caches are not supported.
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
    """Functions with which a rank computes on its part of every sequence.

    Attributes:
        positions: Maps the number of tokens in a part to their positions in the full sequence,
            [tokens] int64.
        gather: Maps a part's keys or values [B, heads, tokens, head_dim] to those of the full
            sequence, in order; gradients are summed back into the parts.
        attend: Causal attention over the full sequence with a scale of 1 / sqrt(head_dim). The
            arguments are queries, keys and values of a part, each [B, heads, tokens, head_dim].
        ranks: Number of parts of a sequence.
        around: Context manager around all of these functions, for observers of the other code.
    """

    positions: Callable[[int], Tensor]
    gather: Callable[[Tensor], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ranks: int
    around: Callable[[], AbstractContextManager[None]] = nullcontext


class Packing(NamedTuple):
    """Separates the documents of a row, so that no token attends to another document.

    Attributes:
        positions: Position of each token in its document, [B, T] int64.
        mask: Whether a token attends to another one, [B, 1, T, T] bool. If a rank holds a part of
            each row, from its tokens to all tokens of the row, [B, 1, T / ranks, T].
    """

    positions: Tensor
    mask: Tensor

    @classmethod
    def of(cls, positions: Tensor | None) -> Packing | None:
        """Find documents, which begin at positions of 0; None means one sequence for each row."""
        if positions is None:
            return None
        columns = torch.arange(positions.shape[1], device=positions.device)
        return cls.of_part(positions, positions, columns)

    @classmethod
    def of_part(cls, positions: Tensor, full: Tensor, places: Tensor) -> Packing:
        """Find the documents in parts of rows.

        Args:
            positions: Positions of a part's tokens in their documents, [B, tokens].
            full: Positions of all tokens of the rows, [B, T].
            places: Indices of the part's tokens in the rows, [tokens].
        """
        documents = (full == 0).cumsum(1)
        is_same_document = documents[:, None, places, None] == documents[:, None, None, :]
        earlier = places[:, None] >= torch.arange(full.shape[1], device=full.device)
        return cls(positions, is_same_document & earlier)


def refuses_groups_on_cuda(q: Tensor, mask: Tensor | None) -> bool:
    """Return whether CUDA's fused kernels refuse fewer key-value heads than query heads.

    torch then falls back without a warning to a kernel that stores all scores: 8 GiB for each
    sample and layer with 32 heads and 8,192 tokens in fp32. The flash kernel accepts neither fp32
    nor a mask, and the memory-efficient kernel accepts no groups. cuDNN accepts a mask, but is not
    the first choice before Hopper.

    Source: PyTorch, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``.
    """
    return q.dtype == torch.float32 or mask is not None


def refuses_groups(q: Tensor, mask: Tensor | None) -> bool:
    """Return whether keys and values must be repeated for the queries of a group.

    On a CPU, the kernel with groups is as fast or faster and needs no copies.
    """
    return q.device.type == "cuda" and refuses_groups_on_cuda(q, mask)


class Rotary:
    """Cosines and sines of positions, each [T, 1, head_dim] or [B, T, 1, head_dim].

    Both halves of a head have the same angles; the first half of the sines is negated.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin

    def turn(self, x: Tensor) -> Tensor:
        """Rotate [B, T, heads, head_dim] by its positions; halves are paired as in Hugging Face."""
        # (first, second) becomes (first cos - second sin, second cos + first sin). It is computed
        # on whole heads, because on a GPU in eager mode kernel launches take longer than arithmetic
        # here.
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        rotated: Tensor = x * self.cos + swapped * self.sin
        return rotated.to(x.dtype)  # the fp32 tables promote bf16 to fp32


class RotaryTable(nn.Module):
    """Cosines and sines of rotary positions (Su et al., RoFormer, 2021).

    The tables are computed from the configuration by ``reset_buffers`` and are not saved. The model
    passes the table module to its blocks, because FSDP's mixed precision would cast tensors that
    are passed to a block, and bf16 is too coarse for the angles of far positions.
    """

    cos: Tensor
    sin: Tensor
    positions: Callable[[int], Tensor] | None = None
    """Maps the number of tokens in a part of a sequence to their positions; None: 0 and up."""

    def __init__(self, head_dim: int, *, max_positions: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        for name in ("cos", "sin"):
            table = torch.empty(max_positions, head_dim)
            self.register_buffer(name, table, persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the tables in place, for example after ``to_empty``."""
        # float64, because at position 100000 an fp32 angle is off by 0.004.
        arange = partial(torch.arange, device=self.cos.device, dtype=torch.float64)
        frequencies = self.theta ** (-arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(arange(len(self.cos)), frequencies)
        with torch.no_grad():
            self.cos.copy_(angles.cos().repeat(1, 2))
            self.sin.copy_(torch.cat((-angles.sin(), angles.sin()), dim=1))

    def forward(self, length: int, positions: Tensor | None = None) -> Rotary:
        """Return the rotation for ``length`` tokens, by default at positions from 0."""
        if positions is not None:
            return Rotary(self.cos[positions][:, :, None], self.sin[positions][:, :, None])
        if self.positions is None:
            return Rotary(self.cos[:length, None], self.sin[:length, None])
        indices = self.positions(length).to(self.cos.device)
        return Rotary(self.cos[indices, None], self.sin[indices, None])


class Attention(nn.Module):
    """Multi-head attention with separate projections and optionally fewer key-value heads.

    The number of heads and positions is taken from the output of the projections, so a
    tensor-parallel rank with some of the heads runs the same code.

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
        head_dim: int | None = None,
        qk_norm_eps: float | None = None,
        bias: bool = False,
        causal: bool = True,
    ) -> None:
        """Create the layer.

        Args:
            hidden_size: Size of the hidden states.
            num_heads: Number of query heads.
            num_key_value_heads: Number of key-value heads; None: one per query head.
            head_dim: Size of a head; None: ``hidden_size / num_heads``.
            qk_norm_eps: Epsilon of the RMSNorms of queries and keys, which normalize each head
                before rotation (as in Qwen3); None: no norms.
            bias: Whether the projections have biases.
            causal: Whether tokens attend only to earlier ones.
        """
        super().__init__()
        self.num_heads: Final = num_heads
        self.num_key_value_heads: Final = num_key_value_heads or num_heads
        self.head_dim: Final = head_dim or hidden_size // num_heads
        self.causal: Final = causal
        query_size = num_heads * self.head_dim
        key_value_size = self.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, query_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, key_value_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, key_value_size, bias=bias)
        self.o_proj = nn.Linear(query_size, hidden_size, bias=bias)
        if qk_norm_eps is not None:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=qk_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=qk_norm_eps)
        self._normalizes = qk_norm_eps is not None

    def forward(
        self, x: Tensor, rotary: RotaryTable | None = None, packing: Packing | None = None
    ) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]; in packed rows, attend only within documents."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self._normalizes:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            # Only here, because with sequence parallelism the blocks see a part of the positions.
            positions = rotary(q.shape[1], None if packing is None else packing.positions)
            q, k = positions.turn(q), positions.turn(k)
        heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        attended = self.attend(*heads) if packing is None else self.attend(*heads, packing.mask)
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute attention; engines may replace this function.

        Args:
            q: Queries [B, heads, T, head_dim].
            k: Keys [B, key_value_heads, T, head_dim]; ``heads`` is a multiple of
                ``key_value_heads``.
            v: Values, same shape as ``k``.
            mask: [B, 1, T, T] bool, true if a query attends to a key. None is causal if the model
                is.

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
