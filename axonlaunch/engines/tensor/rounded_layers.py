"""Makes linear layers round the factors of their products, in place.

This applies to layers of any class, with or without adapters, sharded over tensor ranks or not. The
products themselves are in ``precision.scaled_products`` and ``precision.quantized_products``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from axonlaunch.config.precision import Float8Format, MatmulFormat, QuantizedFormat
from axonlaunch.engines.precision.quantized_products import QuantizedProducts, RoundingStart
from axonlaunch.engines.precision.scaled_products import ScaledProducts
from axonlaunch.engines.tensor.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from axonlaunch.models.adapters.lora import LoraLayer
from axonlaunch.models.modules.convert_module import convert_module


class RoundedLinear(nn.Module):
    """Mixin before the class of a linear layer that rounds the factors of its products.

    Attributes:
        product: Maps an input, the weight [out, in] and the bias to the output.
        weight_is_transposed: Whether the weight is [in, out], as in GPT-2's Conv1D.
    """

    product: Callable[..., Tensor]
    weight_is_transposed: bool
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        weight = self.weight.t() if self.weight_is_transposed else self.weight
        return self.product(x, weight, self.bias)


def round_products(
    layers: Iterable[nn.Module], chosen: MatmulFormat, start: RoundingStart | None = None
) -> None:
    """Make linear layers, sharded or not, round the factors of their products, in place.

    Args:
        chosen: Format that factors are rounded to.
        start: Decides whether a step rounds, with a ``QuantizedFormat``; None rounds in all.
    """
    products: dict[bool, Callable[..., Tensor]] = {}
    for layer in layers:
        # One object for all layers that can share it: dynamo compiles a block again for another.
        is_row = isinstance(layer, RowParallelLinear)
        if is_row not in products:
            products[is_row] = _products(layer, chosen, start)
        layer.__dict__["product"] = products[is_row]
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            continue  # a sharded layer, which calls it
        base: Any = layer.base_class if isinstance(layer, LoraLayer) else type(layer)
        layer.__dict__["weight_is_transposed"] = not issubclass(base, nn.Linear)
        convert_module(layer, _rounded_class(base), beneath=isinstance(layer, LoraLayer))


def _products(
    layer: nn.Module, chosen: MatmulFormat, start: RoundingStart | None
) -> Callable[..., Tensor]:
    if isinstance(chosen, QuantizedFormat):
        group = layer.axis.group if isinstance(layer, RowParallelLinear) else None
        return QuantizedProducts(chosen, group, start)
    assert isinstance(chosen, Float8Format)
    return ScaledProducts(chosen)


@functools.cache
def _rounded_class(base: Any) -> Any:
    """Return one class for all layers of a class: dynamo compiles a block again for each class."""
    return type(base.__name__, (RoundedLinear, base), {"__module__": base.__module__})
