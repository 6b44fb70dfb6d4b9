"""Adds low-rank adapters (LoRA) to the linear layers of a model before it is sharded.

Layers keep their names and weights. An adapter's matrices are below the layer, with PEFT's names:
``...q_proj.lora_A.weight`` and ``...q_proj.lora_B.weight``. Layers that are not linear and the head
can't be adapted. For experts that are packed in one parameter, see ``expert_lora``.

Source: Hu et al., "LoRA", 2021; huggingface/peft, ``tuners/lora/layer.py``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from axonlaunch.config import ConfigIssue, RunConfig
from axonlaunch.config.optimization.parameter_groups import explain_unmatched
from axonlaunch.config.options.adapter import MAGNITUDE, LoraConfig, is_expression
from axonlaunch.models.adapters.dora import LoraMagnitude, adapted_norms, fill_magnitudes
from axonlaunch.models.adapters.expert_lora import (
    ExpertMatrices,
    LoraExperts,
    adapt_experts,
    packed_experts,
)
from axonlaunch.models.adapters.lora_matrix import LoraMatrix
from axonlaunch.models.adapters.quantized_base import base_problems
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.models.tensors.initialization import Constant, Initializer, Uniform

_READ_ELSEWHERE = ("NonDynamicallyQuantizableLinear",)
"""Linear layers with a weight that another module uses directly, so an adapter has no effect."""
ADAPTER_PARTS = (LoraMatrix, LoraMagnitude, ExpertMatrices)
"""Classes of the modules that make up an adapter."""


class LoraLayer(nn.Module):
    """Base class of an adapted linear layer; adds ``scale * B A x`` to its output.

    With DoRA, the result without the bias is also scaled to the trained magnitudes.

    Attributes:
        base_class: Class of the layer without an adapter.
        lora_A: Maps inputs to the rank.
        lora_B: Maps the rank to outputs; initially zero.
        lora_magnitude_vector: Magnitudes of DoRA; None without DoRA.
        lora_dropout: Fraction of the inputs of A that is dropped in training.
        lora_scale: Factor of the product B A.
    """

    base_class: ClassVar[type[nn.Module]]
    lora_A: LoraMatrix  # noqa: N815 - PEFT's name
    lora_B: LoraMatrix  # noqa: N815
    lora_magnitude_vector: LoraMagnitude | None
    lora_dropout: float
    lora_scale: float

    @property
    def is_transposed(self) -> bool:
        """Whether the weight is [inputs, outputs], as in GPT-2's Conv1D."""
        return not issubclass(self.base_class, nn.Linear)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return self.adapt(super().forward(x), x, self._read)

    def adapt(
        self,
        output: Tensor,
        x: Tensor,
        read: Callable[[], tuple[Tensor, Tensor | None]],
        *,
        output_range: tuple[int, int] | None = None,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Apply the adapter to the layer's output, or to this rank's part of it.

        Args:
            output: Output of the layer without the adapter, [..., out].
            x: Input of the layer, [..., in].
            read: Returns the weight [out, in], and the bias if ``output`` includes one.
            output_range: First output and number of outputs in ``output``; None means all outputs
                of B.
            total: Sums over the ranks that hold other inputs; None if this rank holds all inputs.
        """
        dropped = F.dropout(x, self.lora_dropout) if self.lora_dropout and self.training else x
        added: Tensor = self.lora_B(self.lora_A(dropped)) * self.lora_scale
        added = added if output_range is None else added.narrow(-1, *output_range)
        if self.lora_magnitude_vector is None:
            return output + added
        weight, bias = read()
        up = (
            self.lora_B.weight
            if output_range is None
            else self.lora_B.weight.narrow(0, *output_range)
        )
        norms = adapted_norms(weight, self.lora_A.weight, up, scale=self.lora_scale, total=total)
        factor: Tensor = self.lora_magnitude_vector(norms, output_range)
        if dropped is not x:  # as in PEFT, the magnitude scales only inputs that are not dropped
            base = F.linear(dropped, weight.to(dropped.dtype))
            return (output + (factor - 1) * base + factor * added).to(output.dtype)
        scaled = factor * ((output if bias is None else output - bias) + added)
        return (scaled if bias is None else scaled + bias).to(output.dtype)

    def _read(self) -> tuple[Tensor, Tensor | None]:
        layer: Any = self
        return layer.weight.t() if self.is_transposed else layer.weight, layer.bias


def add_adapters(module: nn.Module, config: LoraConfig, spec: ModelSpec) -> None:
    """Add adapters to an unsharded model in place and freeze all other parameters.

    Args:
        module: Model on any device. Adapters are created on the current device, without values.
        config: Configuration of the adapters.
        spec: Spec of the model.
    """
    module.requires_grad_(False)
    for name, layer in linear_layers(module, spec).items():
        if _is_target(name, config, spec):
            inputs, outputs = linear_layer_sizes(layer)
            layer.__class__ = _adapted_classes(cast("Any", type(layer)))
            lora = cast("LoraLayer", layer)
            lora.lora_A = LoraMatrix(inputs, config.rank, bias=False)
            lora.lora_B = LoraMatrix(config.rank, outputs, bias=False)
            lora.lora_magnitude_vector = LoraMagnitude(outputs) if config.dora else None
            lora.lora_dropout, lora.lora_scale = config.dropout, config.scale
    for name, (owner, key) in packed_experts(module).items():
        if _are_targets(name, config):
            adapt_experts(owner, key, config)


def adapter_initializers(module: nn.Module) -> dict[str, Initializer]:
    """Return the initializers of adapter parameters: A as in PEFT, B zero.

    PEFT initializes A with ``kaiming_uniform_(a=sqrt(5))``, which is uniform within 1 /
    sqrt(inputs).
    """
    initializers: dict[str, Initializer] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer | ExpertMatrices):
            initializers[f"{name}.lora_A.weight"] = Uniform(1 / math.sqrt(layer.lora_A.in_features))
            initializers[f"{name}.lora_B.weight"] = Constant(0.0)
            if isinstance(layer, LoraLayer) and layer.lora_magnitude_vector is not None:
                # A placeholder, until the layer's weight has its values.
                initializers[f"{name}{MAGNITUDE}"] = Constant(1.0)
    return initializers


def transposed_layers(module: nn.Module) -> set[str]:
    """Return the names of adapted layers with a weight of shape [inputs, outputs]."""
    layers = (
        (n, submodule)
        for n, submodule in module.named_modules()
        if isinstance(submodule, LoraLayer)
    )
    return {name for name, layer in layers if layer.is_transposed}


def adapted_experts_of(module: nn.Module) -> dict[str, ExpertMatrices]:
    """Return the adapters of packed experts by the full names of the experts' parameters."""
    return {
        f"{name}.{key}": matrices
        for name, owner in module.named_modules()
        if isinstance(owner, LoraExperts)
        for key, matrices in owner.matrices().items()
    }


def start_magnitudes(module: nn.Module) -> None:
    """Set the magnitudes of a module, sharded or not, to the norms of its weights."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    fill_magnitudes(parameters, transposed=transposed_layers(module))


def adapter_names(module: nn.Module) -> set[str]:
    """Return the names of a module's adapter parameters."""
    return set(adapter_initializers(module))


def not_saved(config: RunConfig, module: nn.Module) -> set[str]:
    """Return the names of an unsharded model's parameters that a run's checkpoints leave out."""
    if config.saves_frozen:
        return set()
    return {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


def adapter_problems(
    module: nn.Module, config: LoraConfig, spec: ModelSpec
) -> Iterator[ConfigIssue]:
    """Yield the reasons why the configured adapters can't be added.

    Args:
        module: Unsharded model, after ``add_adapters``.
        config: Configuration of the adapters.
        spec: Spec of the model.
    """
    layers, experts = linear_layers(module, spec), packed_experts(module)
    if config.targets == "all-linear" and not any(_is_target(n, config, spec) for n in layers):
        yield ConfigIssue(
            "adapter.targets", "the model has no linear layer except its head", config.targets
        )
        return
    patterns = [] if config.targets == "all-linear" else config.targets
    adapted = [name for name in experts if _are_targets(name, config)]
    yield from _experts_problems(adapted, config)
    for pattern in patterns:
        named = [*layers] if is_expression(pattern) else [*layers, *experts]
        if not any(_matches(name, pattern) for name in named):
            message = _explain_no_match(pattern, module, layers, spec)
            yield ConfigIssue("adapter.targets", f"{pattern} {message}", config.targets)
    if config.base is not None:
        yield from base_problems(module, config.base, spec, layers=layers)


def _experts_problems(adapted: list[str], config: LoraConfig) -> Iterator[ConfigIssue]:
    """Yield the options that experts packed in a parameter don't support."""
    if not adapted:
        return
    reason = f"which {adapted[0]}, experts packed in a parameter, can't have, as in PEFT"
    if config.dora:
        message = (
            f"scales outputs of a layer, {reason}; use false, or targets that are linear layers"
        )
        yield ConfigIssue("adapter.dora", message, config.dora)
    if config.dropout:
        message = (
            f"leaves out inputs of a layer, {reason}; use 0, or targets that are linear layers"
        )
        yield ConfigIssue("adapter.dropout", message, config.dropout)


def _explain_no_match(
    pattern: str, module: nn.Module, layers: Mapping[str, nn.Module], spec: ModelSpec
) -> str:
    if spec.head is not None and _matches(spec.head, pattern):
        return "is the head, whose loss may be computed in parts; name layers of the blocks"
    for name, other in module.named_modules():
        if name and _matches(name, pattern) and not any(True for _ in other.children()):
            return f"names {name}, of type {type(other).__name__}; adapters are for linear layers"
    experts = packed_experts(module)
    kinds = "linear layer" if not experts else "linear layer and no packed experts"
    return f"matches no {kinds}{explain_unmatched(pattern, [*layers, *experts])}"


def linear_layers(module: nn.Module, spec: ModelSpec) -> dict[str, nn.Module]:
    """Return layers that can be adapted: linear, not the head, and not tied to an embedding."""
    tables = {
        id(submodule.weight)
        for submodule in module.modules()
        if isinstance(submodule, nn.Embedding)
    }
    return {
        name: layer
        for name, layer in module.named_modules()
        if _is_linear(layer)
        and name != spec.head
        and id(layer._parameters.get("weight")) not in tables
    }


def _is_linear(layer: nn.Module) -> bool:
    if isinstance(layer, LoraMatrix) or type(layer).__name__ in _READ_ELSEWHERE:
        return False
    return isinstance(layer, nn.Linear) or (
        type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")
    )


def linear_layer_sizes(layer: Any) -> tuple[int, int]:
    """Return the numbers of inputs and outputs; GPT-2's Conv1D has a weight [inputs, outputs]."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    inputs, outputs = layer.weight.shape
    return inputs, outputs


def _is_target(name: str, config: LoraConfig, spec: ModelSpec) -> bool:
    if config.targets == "all-linear":
        # If a model does not name its head, it is among the modules of the last pipeline stage.
        last = spec.ends[1] if spec.ends else ()
        return not any(f"{name}.".startswith(f"{end}.") for end in last)
    return any(_matches(name, pattern) for pattern in config.targets)


def _are_targets(name: str, config: LoraConfig) -> bool:
    """Return whether ``targets`` selects these packed experts; regular expressions never do."""
    if config.targets == "all-linear":
        return False
    patterns = [pattern for pattern in config.targets if not is_expression(pattern)]
    return any(_matches(name, pattern) for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    if is_expression(pattern):
        return re.fullmatch(pattern, name) is not None
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


@functools.cache
def _adapted_classes(cls: Any) -> Any:
    attributes = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "base_class": cls}
    return type(cls.__name__, (LoraLayer, cls), attributes)
