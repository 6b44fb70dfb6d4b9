"""Layers divided among the ranks of a group, each of which computes with its part.

Their parameters are DTensors of the whole shape, their hot path works on plain tensors. They
start as the undivided layer would, so every rank's torch generator must be in the same state
when they are built. Sizes that the group does not divide are refused.

Source: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation
Recomputation", 2022, for sequence parallelism.
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import collect_from, scatter_to_group
from axonlaunch.engines.tensor.adapters import with_adapter
from axonlaunch.engines.tensor.fused_region import ColumnParallelGroup, leave
from axonlaunch.engines.tensor.local_parameters import (
    TensorAxis,
    empty_part,
    own_entries,
    rank_part,
    refuse_indivisible,
    to_local,
)
from axonlaunch.engines.tensor.torch_internals import assert_on_device
from axonlaunch.models.attention import Attention, Packing, RotaryTable
from axonlaunch.models.convert_module import convert_module


class ColumnParallelLinear(nn.Linear):
    """A linear layer whose output features are divided.

    Attributes:
        axis: The ranks that divide it.
        region: The parallel region that it is in; it may be alone there.
        enters: Whether it takes its input into the region, or what contains it has.
        gather_output: Whether it returns all features, or this rank's.
        transposed: Whether its weight is [in, out].
    """

    cuts: ClassVar = {"weight": 0, "bias": 0}
    axis: TensorAxis
    region: ColumnParallelGroup
    enters: bool = True
    gather_output: bool = False
    transposed: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: ProcessGroup | None = None,
        *,
        bias: bool = True,
        gather_output: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Draw the whole layer as ``nn.Linear`` does and keep this rank's rows.

        Args:
            in_features: Size of an input, whole on every rank.
            out_features: Size of an output over all ranks.
            group: The ranks that divide it; None: the whole world.
            bias: Whether it has one.
            gather_output: Whether it returns all features, or this rank's.
            device: Where its parameters are.
            dtype: What they are.

        Raises:
            ValueError: The group's size does not divide ``out_features``.
        """
        axis = TensorAxis.of_group(group)
        refuse_indivisible("out_features", out_features, axis.group)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.gather_output = gather_output
        self.axis, self.region = axis, ColumnParallelGroup(axis, [self])
        axis.distribute(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out], or to this rank's [..., out / ranks]."""
        if self.enters:
            x = self.region.enter(x)
        y = self._adapt(self.region.output_of(self, x), x)
        if self.enters:
            self.region.leave()
        return collect_from(y, self.axis.group, -1) if self.gather_output else y

    def _adapt(self, output: Tensor, x: Tensor) -> Tensor:
        return with_adapter(self, output, x, read=self.of_rank)

    def of_rank(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's weight [out / ranks, in] and bias."""
        weight, bias = to_local(self.weight), cast("Tensor | None", self.bias)
        return weight.t() if self.transposed else weight, None if bias is None else to_local(bias)


class SharedHeadsLinear(ColumnParallelLinear):
    """A linear layer to the heads of keys or values, which are fewer than the ranks.

    Every rank keeps all of it and computes one head, the one that its query heads attend to.

    Attributes:
        heads: How many it has.
    """

    cuts: ClassVar = {}
    heads: int

    @property
    def _own(self) -> tuple[int, int]:
        """First and number of the outputs of this rank's head."""
        group, length = self.axis.group, self.out_features // self.heads
        return group.rank * self.heads // group.size * length, length

    def _adapt(self, output: Tensor, x: Tensor) -> Tensor:
        return with_adapter(self, output, x, read=self.of_rank, own=self._own)

    def of_rank(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [out / heads, in] and the bias of this rank's head."""
        group, (first, length) = self.axis.group, self._own
        weight, bias = to_local(self.weight, summed_over=group), cast("Tensor | None", self.bias)
        weight = (weight.t() if self.transposed else weight).narrow(0, first, length)
        if bias is None:
            return weight, None
        return weight, to_local(bias, summed_over=group).narrow(0, first, length)


class VocabParallelHead(ColumnParallelLinear):
    """A linear layer to the logits of a divided vocabulary; each rank returns its own.

    ``vocab_parallel_cross_entropy_sum`` takes them as they are.
    """


class RowParallelLinear(nn.Linear):
    """A linear layer whose input features are divided; the ranks' products are summed.

    Attributes:
        axis: The ranks that divide it.
        input_is_parallel: Whether its input is this rank's features, as a column-parallel layer
            leaves them, or all.
        sequence_parallel: Whether it returns this rank's part of the sequence, or all of it.
        transposed: Whether its weight is [in, out].
    """

    cuts: ClassVar = {"weight": 1}
    axis: TensorAxis
    input_is_parallel: bool = True
    sequence_parallel: bool = False
    transposed: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: ProcessGroup | None = None,
        *,
        bias: bool = True,
        input_is_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Draw the whole layer as ``nn.Linear`` does and keep this rank's columns.

        Args:
            in_features: Size of an input over all ranks.
            out_features: Size of an output, whole on every rank.
            group: The ranks that divide it; None: the whole world.
            bias: Whether it has one; every rank holds it, and it is added once.
            input_is_parallel: Whether inputs are this rank's features, or all.
            device: Where its parameters are.
            dtype: What they are.

        Raises:
            ValueError: The group's size does not divide ``in_features``.
        """
        axis = TensorAxis.of_group(group)
        refuse_indivisible("in_features", in_features, axis.group)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.input_is_parallel = input_is_parallel
        self.axis = axis
        axis.distribute(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in], or this rank's [..., in / ranks], to [..., out]."""
        group = self.axis.group
        weight = to_local(self.weight)
        weight = weight.t() if self.transposed else weight
        if not self.input_is_parallel:
            x = scatter_to_group(x, group, -1)
        elif x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"a row-parallel layer of {self.in_features} inputs on {group.size} ranks takes "
                f"{weight.shape[1]} features per rank, got {x.shape[-1]}: feed it what a "
                "column-parallel layer returns"
            )
        own = F.linear(x, weight)
        part = with_adapter(self, own, x, read=lambda: (weight, None), group=group)
        y = leave(part, group, sequence_parallel=self.sequence_parallel)
        bias = cast("Tensor | None", self.bias)
        if bias is None:
            return y
        # Each rank adds it to its part of the sequence, so sees that part of its gradient. Under
        # autocast a linear layer's bias is cast as its weight is, and its output stays what it is.
        bias = to_local(bias, summed_over=group if self.sequence_parallel else None)
        return y + bias.to(y.dtype)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding whose rows, one a token of the vocabulary, are divided.

    The last rank has fewer where the group's size does not divide them.

    Attributes:
        axis: The ranks that divide it.
        sequence_parallel: Whether it returns this rank's part of the sequence, or all of it.
    """

    cuts: ClassVar = {"weight": 0}
    axis: TensorAxis
    sequence_parallel: bool = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        group: ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Draw the whole table as ``nn.Embedding`` does and keep this rank's rows.

        Args:
            num_embeddings: Tokens of the vocabulary.
            embedding_dim: Size of a token's vector.
            group: The ranks that divide it; None: the whole world.
            device: Where the table is.
            dtype: What it is.

        Raises:
            ValueError: A rank would have none of ``num_embeddings``.
        """
        axis = TensorAxis.of_group(group)
        if problem := empty_part("num_embeddings", num_embeddings, axis.group.size):
            raise ValueError(problem)
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)
        self.axis = axis
        axis.distribute(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [...] to vectors [..., embedding_dim].

        Raises:
            RuntimeError: A token is not in the vocabulary (on CUDA, when the device gets there).
        """
        group, weight = self.axis.group, to_local(self.weight)
        in_vocabulary = (tokens >= 0) & (tokens < self.num_embeddings)
        assert_on_device(in_vocabulary.all(), "a token is not in the vocabulary")
        mine, elsewhere = own_entries(tokens, group, size=self.num_embeddings)
        padding = None
        if self.padding_idx is not None:
            first, count = rank_part(self.num_embeddings, group)
            if first <= self.padding_idx < first + count:
                padding = self.padding_idx - first
        # Row 0 stands in for the others' tokens and gets a gradient of zero from them.
        vectors = F.embedding(mine, weight, padding).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return leave(vectors, group, sequence_parallel=self.sequence_parallel)


class ColumnParallelEmbedding(nn.Embedding):
    """An embedding whose features are divided; every rank returns all of them.

    Attributes:
        axis: The ranks that divide it.
    """

    cuts: ClassVar = {"weight": 1}
    axis: TensorAxis

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [...] to vectors [..., embedding_dim]."""
        vectors = F.embedding(tokens, to_local(self.weight), self.padding_idx)
        return collect_from(vectors, self.axis.group, -1)


class TensorParallelAttention(Attention):
    """Multi-head attention whose heads are divided; its input enters the parallel region once.

    Attributes:
        axis: The ranks that divide it.
        region: The region that its projections share.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_value_heads: int | None = None,
        group: ProcessGroup | None = None,
        *,
        bias: bool = False,
        causal: bool = True,
    ) -> None:
        """Draw the whole layer as ``Attention`` does and keep this rank's heads.

        Args:
            hidden_size: Size of a position's input and output.
            num_heads: Query heads over all ranks.
            num_key_value_heads: Key-value heads over all ranks; None: as many.
            group: The ranks that divide it; None: the whole world.
            bias: Whether its projections have one.
            causal: Whether a position sees earlier ones alone.

        Raises:
            ValueError: The group's size does not divide the heads, or the heads don't fit.
        """
        axis = TensorAxis.of_group(group)
        heads = num_key_value_heads or num_heads
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size={hidden_size} is not divisible by {num_heads} heads")
        if num_heads % heads:
            raise ValueError(f"num_heads={num_heads} is not divisible by {heads} key-value heads")
        refuse_indivisible("num_heads", num_heads, axis.group)
        refuse_indivisible("num_key_value_heads", heads, axis.group)
        super().__init__(
            hidden_size,
            num_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            bias=bias,
            causal=causal,
        )
        self.axis = axis
        projections = (self.q_proj, self.k_proj, self.v_proj)
        columns = [convert_module(projection, ColumnParallelLinear) for projection in projections]
        self.region = ColumnParallelGroup(axis, columns)
        for column in columns:
            column.axis, column.region, column.enters = axis, self.region, False
        convert_module(self.o_proj, RowParallelLinear).axis = axis
        axis.distribute(self)

    def forward(
        self, x: Tensor, rotary: RotaryTable | None = None, packing: Packing | None = None
    ) -> Tensor:
        """Attend: [B, T, hidden] to [B, T, hidden], whole on every rank."""
        try:
            return super().forward(self.region.enter(x), rotary, packing)
        finally:
            self.region.leave()
