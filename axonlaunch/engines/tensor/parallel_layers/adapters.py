"""Shards the low-rank adapters of sharded layers in the same way as the layers.

- Column-parallel layer: B is sharded by outputs, A is replicated.
- Row-parallel layer: A is sharded by inputs, B is replicated. The adapter's product is summed over
  ranks together with the layer's.

Magnitudes are sharded like B, and the weight norms of a row-parallel layer are summed over ranks.
Each rank sees only part of the gradient of a replicated matrix, so that gradient is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import sum_over
from axonlaunch.engines.tensor.parallel_layers.local_parameters import (
    ReadsLocally,
    ShardSpec,
    TensorAxis,
)
from axonlaunch.models.adapters.expert_lora import ExpertMatrices, LoraExperts
from axonlaunch.models.adapters.lora import LoraLayer
from axonlaunch.models.modules.convert_module import convert_module


def with_adapter(
    layer: nn.Module,
    output: Tensor,
    x: Tensor,
    *,
    read: Callable[[], tuple[Tensor, Tensor | None]],
    output_range: tuple[int, int] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return the output of this rank's part of a layer, including its adapter if it has one.

    Args:
        layer: The sharded layer.
        output: Output of the layer's weight, before it is summed over ranks.
        x: Input of this rank's part of the layer.
        read: Returns this rank's weight, [outputs, inputs], and the bias included in ``output``.
        output_range: First output of this rank and their number, if B computes those of other
            ranks too; None if all outputs of B are this rank's.
        group: Ranks whose inputs differ, over which the adapter's sums run; None if inputs agree.
    """
    if not isinstance(layer, LoraLayer):
        return output
    total = None if group is None else partial(sum_over, group=group)
    return layer.adapt(output, x, read, output_range=output_range, total=total)


def shard_adapter(
    layer: nn.Module,
    axis: TensorAxis,
    *,
    inputs: ShardSpec | None = None,
    outputs: ShardSpec | None = None,
) -> None:
    """Shard the adapter of a layer; do nothing if it has no adapter.

    Args:
        layer: The sharded layer.
        axis: The tensor axis.
        inputs: Shard of A's inputs; None: A is replicated.
        outputs: Shard of B's outputs; None: B is replicated.
    """
    if not isinstance(layer, LoraLayer):
        return
    _shard(layer.lora_A, inputs, axis)
    _shard(layer.lora_B, outputs, axis)
    for matrix in (layer.lora_A, layer.lora_B):
        matrix.gives_partial_sums = inputs is not None
        # In a column-parallel layer, each rank's part of B reads the full output of A. In a layer
        # with shared heads, the query heads of several ranks read the output of B.
        is_read_in_parts = matrix is layer.lora_A or outputs is None
        matrix.gets_partial_gradients = inputs is None and is_read_in_parts
    if layer.lora_magnitude_vector is not None:
        _shard(layer.lora_magnitude_vector, outputs, axis)


def shard_experts(
    experts: nn.Module, axis: TensorAxis, *, shard_specs: Mapping[str, ShardSpec]
) -> None:
    """Shard the adapters of experts that are packed into 3-D parameters, if they have adapters.

    Args:
        experts: The sharded experts.
        axis: The tensor axis.
        shard_specs: Shards of the sharded parameters, by name. Adapters of other parameters are
            replicated.
    """
    if not isinstance(experts, LoraExperts):
        return
    for key, matrices in experts.matrices().items():
        if (shard := shard_specs.get(key)) is not None:
            inputs, outputs = matrix_shards(matrices, shard)
            _shard(matrices.lora_A, inputs, axis)
            _shard(matrices.lora_B, outputs, axis)


def matrix_shards(
    matrices: ExpertMatrices, shard: ShardSpec
) -> tuple[ShardSpec | None, ShardSpec | None]:
    """Return how A and B of experts with a sharded parameter are sharded; None: replicated.

    A parameter has shape [experts, outputs, inputs], or [experts, inputs, outputs].
    """
    if (shard.dim == 1) != matrices.is_transposed:
        return None, ShardSpec(0, shard.pieces)
    return ShardSpec(1, shard.pieces), None


def _shard(matrix: nn.Module, shard: ShardSpec | None, axis: TensorAxis) -> None:
    if not isinstance(matrix, ReadsLocally):
        convert_module(matrix, ReadsLocally)
    matrix.__dict__.update(_axis=axis, _sums_gradients=True)
    matrix.__dict__["shard_specs"] = {} if shard is None else {"weight": shard}
