"""Computes a region's column-parallel layers together, so that backward can overlap.

A parallel region is a part of the model in which each rank has only some heads or features. The
gradient of its layers' common input is summed over ranks while the weight gradients are computed. A
layer that reads a different input is computed separately.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021,
and Megatron-LM's linear layer with asynchronous communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import (
    all_gather_from_group,
    all_reduce_from_group,
    copy_to_group,
    finish,
    reduce_scatter_to,
    start_reduce_scatter,
    start_sum,
)
from axonlaunch.engines.precision.autocast import in_autocast_dtype
from axonlaunch.engines.tensor.parallel_layers.local_parameters import TensorAxis

SEQUENCE_DIM = 1
"""Dim of hidden states [B, T, H] that sequence parallelism shards."""


def enter_region(x: Tensor, group: ProcessGroup, *, sequence_parallel: bool) -> Tensor:
    """Bring an input into a parallel region, by copying it or gathering its sequence parts."""
    return (
        all_gather_from_group(x, group, SEQUENCE_DIM)
        if sequence_parallel
        else copy_to_group(x, group)
    )


def leave(x: Tensor, group: ProcessGroup, *, sequence_parallel: bool) -> Tensor:
    """Sum a region's partial results; return all positions, or this rank's part of the sequence."""
    return (
        reduce_scatter_to(x, group, SEQUENCE_DIM)
        if sequence_parallel
        else all_reduce_from_group(x, group)
    )


class Column(Protocol):
    """A column-parallel layer.

    Attributes:
        in_features: Size of an input.
        product: Maps an input, a weight and a bias to the output.
    """

    in_features: int
    product: Callable[..., Tensor]

    def rank_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's weight [outputs, inputs] and bias, through autograd."""


class ColumnParallelGroup:
    """State that column-parallel layers with a common input share during a forward.

    Attributes:
        axis: The tensor axis over which the layers are sharded.
        sequence_parallel: Whether the input is this rank's part of the sequence.
    """

    def __init__(
        self, axis: TensorAxis, columns: Sequence[Column], *, sequence_parallel: bool = False
    ) -> None:
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self._columns = tuple(columns)
        self._source: Tensor | None = None
        self._input: Tensor | None = None
        self._outputs: dict[Column, Tensor] = {}

    def enter(self, x: Tensor) -> Tensor:
        """Bring the input into the region."""
        entered = enter_region(x, self.axis.group, sequence_parallel=self.sequence_parallel)
        # The compiler arranges overlap itself, and without gradients there is nothing to overlap.
        no_overlap = torch.compiler.is_compiling() or not torch.is_grad_enabled()
        if self.axis.overlaps and not no_overlap:
            self._source, self._input = x, entered
        return entered

    def leave(self) -> None:
        """Drop the input and outputs of the forward."""
        self._source = self._input = None
        self._outputs = {}

    def output_of(self, column: Column, x: Tensor) -> Tensor:
        """Return a layer's output; the first layer called with the region's input computes all."""
        if x is not self._input:
            return column.product(x, *column.rank_parameters())
        if not self._outputs:
            assert self._source is not None
            # In latent attention some layers read a narrower input.
            columns = [member for member in self._columns if member.in_features == x.shape[-1]]
            outputs = linears(self._source, x, columns, region=self)
            self._outputs = dict(zip(columns, outputs, strict=True))
        return self._outputs[column]


def linears(
    source: Tensor, entered: Tensor, columns: Sequence[Column], *, region: ColumnParallelGroup
) -> tuple[Tensor, ...]:
    """Apply column-parallel layers to one input.

    Args:
        source: The input before it enters the region; receives the gradient, summed over ranks.
        entered: The input inside the region, used detached: it receives no gradient from here.
        region: The region, which decides how the input enters.
    """
    parameters = [column.rank_parameters() for column in columns]
    weights = [weight for weight, _ in parameters]
    biases = [bias for _, bias in parameters]
    x = entered.detach()
    # Inside the autograd function below, autocast would cast tensors that backward needs uncast.
    x, *weights = in_autocast_dtype(x, *weights)
    biases = [b if b is None else b.to(x.dtype) for b in biases]
    outputs: tuple[Tensor, ...] = _apply_linears(source, x, region, len(weights), *weights, *biases)
    return outputs


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        x: Tensor,
        region: ColumnParallelGroup,
        count: int,
        *parameters: Any,
    ) -> Any:
        weights, biases = parameters[:count], parameters[count:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.in_parts = region.axis.group, region.sequence_parallel
        ctx.dtype = source.dtype
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        x, *weights = ctx.saved_tensors
        count, needed = len(weights), ctx.needs_input_grad
        rows = [g if g is None else g.reshape(-1, g.shape[-1]) for g in gradients]
        pending = None
        if needed[0]:
            pending = _start(
                _input_gradient(rows, weights, x).to(ctx.dtype), ctx.group, ctx.in_parts
            )
        inputs = x.reshape(-1, x.shape[-1])
        parameter_gradients = [
            g.t() @ inputs if g is not None and needed[4 + index] else None
            for index, g in enumerate(rows)
        ]
        parameter_gradients += [
            g.sum(0) if g is not None and needed[4 + count + index] else None
            for index, g in enumerate(rows)
        ]
        return None if pending is None else finish(pending), None, None, None, *parameter_gradients


_apply_linears: Any = _Linears.apply


def _input_gradient(rows: list[Tensor | None], weights: list[Tensor], x: Tensor) -> Tensor:
    """Return this rank's part of the input gradient."""
    total: Tensor | None = None
    for gradient, weight in zip(rows, weights, strict=True):
        if gradient is not None:
            total = gradient @ weight if total is None else total.addmm_(gradient, weight)
    assert total is not None
    return total.view(x.shape)


def _start(gradient: Tensor, group: ProcessGroup, in_parts: bool) -> Tensor:
    if in_parts:
        return start_reduce_scatter(gradient, group, SEQUENCE_DIM)
    return start_sum(gradient, group)
