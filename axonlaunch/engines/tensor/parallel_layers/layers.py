"""Layers whose parameters are sharded among the ranks of a group.

Parameters are DTensors of the full shape; forward and backward work on plain local tensors. The
layers are initialized to the values of the unsharded layer, so every rank's torch generator must
be in the same state when they are built. Sizes that are not divisible by the group's size are an
error.

Source: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation
Recomputation", 2022, for sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import collect_from, scatter_to_group
from axonlaunch.engines.tensor.parallel_layers.adapters import with_adapter
from axonlaunch.engines.tensor.parallel_layers.fused_region import ColumnParallelGroup, leave
from axonlaunch.engines.tensor.parallel_layers.local_parameters import (
    TensorAxis,
    empty_part,
    local_entries,
    rank_part,
    refuse_indivisible,
    to_local,
)
from axonlaunch.engines.tensor.torch_internals import assert_on_device
from axonlaunch.models.modules.attention import Attention, Packing, RotaryTable
from axonlaunch.models.modules.convert_module import convert_module


class ColumnParallelLinear(nn.Linear):
    """A linear layer whose output features are sharded.

    Attributes:
        axis: The tensor axis over which the layer is sharded.
        region: The parallel region that contains the layer, possibly as its only one.
        enters: Whether the layer brings its input into the region itself. False if a containing
            module does that.
        gather_output: Whether the layer returns all output features; otherwise this rank's.
        transposed: Whether the weight has shape [in, out].
        product: Maps an input, this rank's weight and its bias to this rank's outputs.
    """

    shard_specs: ClassVar = {"weight": 0, "bias": 0}
    product: Callable[..., Tensor] = staticmethod(F.linear)
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
        """Initialize the full layer as ``nn.Linear`` does and keep this rank's rows.

        Args:
            in_features: Input size, the same on every rank.
            out_features: Output size, summed over all ranks.
            group: The ranks that share the layer; None for the whole world.
            bias: Whether the layer has a bias.
            gather_output: Whether the layer returns all output features; otherwise this rank's.
            device: Device of the parameters.
            dtype: Type of the parameters.

        Raises:
            ValueError: ``out_features`` is not divisible by the group's size.
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
        return with_adapter(self, output, x, read=self.rank_parameters)

    def rank_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's weight [out / ranks, in] and bias."""
        weight, bias = to_local(self.weight), cast("Tensor | None", self.bias)
        return weight.t() if self.transposed else weight, None if bias is None else to_local(bias)


class SharedHeadsLinear(ColumnParallelLinear):
    """A key or value projection with fewer heads than the group has ranks.

    Every rank keeps the full weight and computes only the head that its query heads attend to.

    Attributes:
        heads: Number of key or value heads.
    """

    shard_specs: ClassVar = {}
    heads: int

    @property
    def _head_range(self) -> tuple[int, int]:
        """Return the first output of this rank's head and the number of its outputs."""
        group, length = self.axis.group, self.out_features // self.heads
        return group.rank * self.heads // group.size * length, length

    def _adapt(self, output: Tensor, x: Tensor) -> Tensor:
        return with_adapter(
            self, output, x, read=self.rank_parameters, output_range=self._head_range
        )

    def rank_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [out / heads, in] and the bias of this rank's head."""
        group, (first, length) = self.axis.group, self._head_range
        weight, bias = to_local(self.weight, summed_over=group), cast("Tensor | None", self.bias)
        weight = (weight.t() if self.transposed else weight).narrow(0, first, length)
        if bias is None:
            return weight, None
        return weight, to_local(bias, summed_over=group).narrow(0, first, length)


class VocabParallelHead(ColumnParallelLinear):
    """A linear layer to logits sharded over the vocabulary; each rank returns its shard.

    The result can be passed directly to ``vocab_parallel_cross_entropy_sum``.
    """


class RowParallelLinear(nn.Linear):
    """A linear layer whose input features are sharded; the ranks' products are summed.

    Attributes:
        axis: The tensor axis over which the layer is sharded.
        input_is_parallel: Whether the input holds only this rank's features, as returned by a
            column-parallel layer; otherwise all features.
        sequence_parallel: Whether the layer returns only this rank's part of the sequence.
        transposed: Whether the weight has shape [in, out].
        product: Maps this rank's part of an input and its weight to its term of the outputs.
    """

    shard_specs: ClassVar = {"weight": 1}
    product: Callable[..., Tensor] = staticmethod(F.linear)
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
        """Initialize the full layer as ``nn.Linear`` does and keep this rank's columns.

        Args:
            in_features: Input size, summed over all ranks.
            out_features: Output size, the same on every rank.
            group: The ranks that share the layer; None for the whole world.
            bias: Whether the layer has a bias. Every rank holds the full bias; it is added once.
            input_is_parallel: Whether inputs hold only this rank's features; otherwise all.
            device: Device of the parameters.
            dtype: Type of the parameters.

        Raises:
            ValueError: ``in_features`` is not divisible by the group's size.
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
                f"{weight.shape[1]} features per rank, got {x.shape[-1]}: pass the output "
                "of a column-parallel layer"
            )
        product = self.product(x, weight)
        adapted = with_adapter(self, product, x, read=lambda: (weight, None), group=group)
        y = leave(adapted, group, sequence_parallel=self.sequence_parallel)
        bias = cast("Tensor | None", self.bias)
        if bias is None:
            return y
        # With sequence parallelism each rank adds the bias to its part of the sequence, and
        # therefore sees only that part of the bias gradient. As under autocast in a linear layer,
        # the bias is cast and the output keeps its type.
        bias = to_local(bias, summed_over=group if self.sequence_parallel else None)
        return y + bias.to(y.dtype)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding sharded by rows, that is by tokens of the vocabulary.

    The last rank has fewer rows if the vocabulary is not divisible by the group's size.

    Attributes:
        axis: The tensor axis over which the table is sharded.
        sequence_parallel: Whether the embedding returns only this rank's part of the sequence.
    """

    shard_specs: ClassVar = {"weight": 0}
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
        """Initialize the full table as ``nn.Embedding`` does and keep this rank's rows.

        Args:
            num_embeddings: Size of the vocabulary.
            embedding_dim: Size of a token's vector.
            group: The ranks that share the table; None for the whole world.
            device: Device of the table.
            dtype: Type of the table.

        Raises:
            ValueError: At least one rank would have no rows.
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
            RuntimeError: A token is not in the vocabulary (asynchronously on CUDA).
        """
        group, weight = self.axis.group, to_local(self.weight)
        in_vocabulary = (tokens >= 0) & (tokens < self.num_embeddings)
        assert_on_device(in_vocabulary.all(), "a token is not in the vocabulary")
        rows, elsewhere = local_entries(tokens, group, size=self.num_embeddings)
        padding = None
        if self.padding_idx is not None:
            first, count = rank_part(self.num_embeddings, group)
            if first <= self.padding_idx < first + count:
                padding = self.padding_idx - first
        # Tokens of other ranks look up row 0; the mask makes their result and their gradient zero.
        vectors = F.embedding(rows, weight, padding).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return leave(vectors, group, sequence_parallel=self.sequence_parallel)


class ColumnParallelEmbedding(nn.Embedding):
    """An embedding sharded by features; every rank returns all features.

    Attributes:
        axis: The tensor axis over which the table is sharded.
    """

    shard_specs: ClassVar = {"weight": 1}
    axis: TensorAxis

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [...] to vectors [..., embedding_dim]."""
        vectors = F.embedding(tokens, to_local(self.weight), self.padding_idx)
        return collect_from(vectors, self.axis.group, -1)


class TensorParallelAttention(Attention):
    """Multi-head attention with sharded heads; its input enters the parallel region once.

    Attributes:
        axis: The tensor axis over which the heads are sharded.
        region: The parallel region that the three input projections share.
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
        """Initialize the full layer as ``Attention`` does and keep this rank's heads.

        Args:
            hidden_size: Size of a position's input and output.
            num_heads: Number of query heads over all ranks.
            num_key_value_heads: Number of key-value heads over all ranks; None for ``num_heads``.
            group: The ranks that share the layer; None for the whole world.
            bias: Whether the projections have biases.
            causal: Whether each position sees only earlier ones.

        Raises:
            ValueError: The heads are not divisible by the group's size, or do not fit
                ``hidden_size`` or one another.
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
        """Attend: map [B, T, hidden] to [B, T, hidden], both complete on every rank."""
        try:
            return super().forward(self.region.enter(x), rotary, packing)
        finally:
            self.region.leave()
