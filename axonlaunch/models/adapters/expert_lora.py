"""Low-rank adapters of experts that are packed in one 3-D parameter, as in PEFT.

During the experts' forward, the parameter is replaced with ``W + scale * B A`` for each expert.
Dropout of A's inputs and DoRA are not supported, because they need the inputs or outputs of a
layer.

Source: huggingface/peft, ``ParamWrapper`` in ``tuners/lora/layer.py``.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from axonlaunch.config.options.adapter import EXPERTS, LoraConfig
from axonlaunch.models.adapters.lora_matrix import LoraMatrix
from axonlaunch.models.tensors.packed_blocks import logical_shape


class ExpertMatrices(nn.Module):
    """A and B of all experts of a parameter [experts, outputs, inputs].

    Attributes:
        lora_A: [rank x experts, inputs]; the rows of one expert are consecutive.
        lora_B: [outputs, rank x experts]; the experts of one rank index are consecutive.
        lora_scale: Factor of the product B A.
        is_transposed: Whether the parameter is [experts, inputs, outputs].
    """

    def __init__(self, weight: Tensor, config: LoraConfig, *, is_transposed: bool) -> None:
        super().__init__()
        experts, outputs, inputs = weight.shape
        if is_transposed:
            inputs, outputs = outputs, inputs
        self.lora_A = LoraMatrix(inputs, config.rank * experts, bias=False)
        self.lora_B = LoraMatrix(config.rank * experts, outputs, bias=False)
        self.lora_scale, self.is_transposed = config.scale, is_transposed

    def forward(self, weight: Tensor) -> Tensor:
        """Return the adapted parameter, or this rank's part of it."""
        down, up = self.lora_A.weight, self.lora_B.weight
        return adapted_experts(
            weight, down, up, scale=self.lora_scale, is_transposed=self.is_transposed
        )


class LoraExperts(nn.Module):
    """Base class that makes an experts module compute with adapted parameters.

    Attributes:
        base_class: Class of the module without adapters.
    """

    base_class: ClassVar[type[nn.Module]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of ``base_class`` with adapted parameters."""
        adapted = {key: matrices(getattr(self, key)) for key, matrices in self.matrices().items()}
        # Attribute lookup finds __dict__ entries before parameters of the same name.
        vars(self).update(adapted)
        try:
            return super().forward(*args, **kwargs)
        finally:
            for key in adapted:
                del vars(self)[key]

    def matrices(self) -> dict[str, ExpertMatrices]:
        """Return the adapters by parameter name, in the order of the parameters."""
        return {
            name.removesuffix(EXPERTS): part
            for name, part in self.named_children()
            if isinstance(part, ExpertMatrices)
        }


def adapted_experts(
    weight: Tensor, down: Tensor, up: Tensor, *, scale: float, is_transposed: bool
) -> Tensor:
    """Return ``weight + scale * up @ down`` for each expert.

    Args:
        weight: [experts, outputs, inputs], or [experts, inputs, outputs] if transposed.
        down: A, [rank x experts, inputs].
        up: B, [outputs, rank x experts].
        scale: Factor of the product.
        is_transposed: Whether the weight is [experts, inputs, outputs].
    """
    experts = len(weight)
    down = down.view(experts, -1, down.shape[-1]).to(weight.dtype)
    up = up.view(len(up), -1, experts).permute(2, 0, 1).to(weight.dtype)
    left_factors, right_factors = (down.mT, up.mT) if is_transposed else (up, down)
    device = weight.device.type
    # Autocast would change the dtype of the sum.
    with torch.autocast("cpu" if device == "meta" else device, enabled=False):
        return torch.baddbmm(weight, left_factors, right_factors, alpha=scale)


def packed_experts(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return parameters that pack experts: ``{full name: (module, parameter name)}``.

    These are the 3-D parameters of modules with a custom forward, except those of ``torch.nn``
    modules such as convolutions.
    """
    return {
        f"{name}.{key}": (owner, key)
        for name, owner in module.named_modules()
        if type(owner).forward is not nn.Module.forward
        and not type(owner).__module__.startswith("torch.nn.")
        for key, parameter in owner._parameters.items()
        if name and parameter is not None and len(logical_shape(parameter)) == 3
    }


def adapt_experts(owner: nn.Module, key: str, config: LoraConfig) -> None:
    """Add an adapter to a module's parameter in place; the adapter has no values yet."""
    if not isinstance(owner, LoraExperts):
        owner.__class__ = _adapted_class(cast("Any", type(owner)))
    weight = owner._parameters[key]
    assert weight is not None
    is_transposed = bool(getattr(owner, "is_transposed", False))
    owner.add_module(f"{key}{EXPERTS}", ExpertMatrices(weight, config, is_transposed=is_transposed))


@functools.cache
def _adapted_class(cls: Any) -> Any:
    attributes = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "base_class": cls}
    return type(cls.__name__, (LoraExperts, cls), attributes)
