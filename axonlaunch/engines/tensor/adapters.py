"""Low-rank adapters of layers that are divided over a tensor axis: each is cut as its layer is.

Of a column layer B is cut by outputs, and A is whole on every rank; of a row layer A is cut by
inputs, and B is whole: its product is summed over ranks together with the layer's own. Magnitudes
are cut as B is, and norms of a row layer's weight are summed over ranks. Each rank sees a part of
the gradient of what is whole, so that is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import sum_over
from axonlaunch.engines.tensor.local_parameters import (
    Cut,
    ReadsLocally,
    TensorAxis,
)
from axonlaunch.models.convert_module import convert_module
from axonlaunch.models.expert_lora import LoraExperts
from axonlaunch.models.lora import LoraLayer


def with_adapter(
    layer: nn.Module,
    output: Tensor,
    x: Tensor,
    *,
    read: Callable[[], tuple[Tensor, Tensor | None]],
    own: tuple[int, int] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return what a rank's part of a layer computes, with its adapter's part if it has one.

    Args:
        layer: Divided.
        output: Of its own weight, before ranks' results are summed.
        x: What the rank's part of the layer is given.
        read: Returns the rank's weight, [outputs, inputs], and the bias that ``output`` has in it.
        own: First and number of the outputs that are this rank's, where B gives others too.
        group: The ranks that have other inputs, if some have.
    """
    if not isinstance(layer, LoraLayer):
        return output
    total = None if group is None else partial(sum_over, group=group)
    return layer.adapt(output, x, read, own=own, total=total)


def divide_adapter(
    layer: nn.Module, axis: TensorAxis, *, inputs: Cut | None = None, outputs: Cut | None = None
) -> None:
    """Cut the adapter of a layer, if it has one.

    Args:
        layer: Divided.
        axis: Over which.
        inputs: How those of A are cut; None: they are not.
        outputs: How those of B are.
    """
    if not isinstance(layer, LoraLayer):
        return
    _cut(layer.lora_A, inputs, axis)
    _cut(layer.lora_B, outputs, axis)
    for matrix in (layer.lora_A, layer.lora_B):
        matrix.gives_partial_sums = inputs is not None
        # Of a column layer each rank's part of B reads all of what A gives, of a shared one all
        # ranks' query heads what B gives.
        is_read_in_parts = matrix is layer.lora_A or outputs is None
        matrix.gets_partial_gradients = inputs is None and is_read_in_parts
    if layer.lora_magnitude_vector is not None:
        _cut(layer.lora_magnitude_vector, outputs, axis)


def divide_experts(experts: nn.Module, axis: TensorAxis, *, cuts: Mapping[str, Cut]) -> None:
    """Cut the adapters of experts that are packed in 3-D parameters, if they have some.

    Args:
        experts: Divided.
        axis: Over which.
        cuts: How their parameters are cut; those that are not, every rank adapts alike.
    """
    if not isinstance(experts, LoraExperts):
        return
    for key, matrices in experts.matrices().items():
        if (cut := cuts.get(key)) is not None:
            # A weight is [experts, outputs, inputs], or the other way round.
            is_of_outputs = (cut.dim == 1) != matrices.is_transposed
            _cut(matrices.lora_A, None if is_of_outputs else Cut(1, cut.pieces), axis)
            _cut(matrices.lora_B, Cut(0, cut.pieces) if is_of_outputs else None, axis)


def _cut(matrix: nn.Module, cut: Cut | None, axis: TensorAxis) -> None:
    if not isinstance(matrix, ReadsLocally):
        convert_module(matrix, ReadsLocally)
    matrix.__dict__.update(_axis=axis, _sums_gradients=True)
    matrix.__dict__["cuts"] = {} if cut is None else {"weight": cut}
