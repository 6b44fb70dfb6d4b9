"""Low-rank adapters of layers that are divided over a tensor axis: each is cut as its layer is.

Of a column layer B is cut by outputs, and A is whole on every rank; of a row layer A is cut by
inputs, and B is whole: its product is summed over ranks together with the layer's own. Magnitudes
are cut as B is, and norms of a row layer's weight are summed over ranks. Each rank sees a part of
the gradient of what is whole, so that is summed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import sum_over
from axonlaunch.engines.tensor.local_parameters import (
    Cut,
    ReadsLocally,
    TensorAxis,
    convert_module,
)
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
    return layer.adapted(output, x, read, own=own, total=total)


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
    parts = [
        (layer.lora_A, inputs),
        (layer.lora_B, outputs),
        (layer.lora_magnitude_vector, outputs),
    ]
    for matrix, cut in parts:
        if matrix is None:
            continue
        if not isinstance(matrix, ReadsLocally):
            convert_module(matrix, ReadsLocally)
        matrix.__dict__.update(_axis=axis, _sums_gradients=True)
        matrix.__dict__["cuts"] = {} if cut is None else {"weight": cut}
