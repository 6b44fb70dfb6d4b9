"""Detects whether a module computes a linear layer or an embedding, whatever its class.

A subclass with a custom forward counts as linear if it gives the results of a linear layer on a few
test numbers. A subclass of ``nn.Embedding`` counts as an embedding if its forward looks up the
unchanged input once; it may then change each vector. All other modules are neither.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonlaunch.engines.tensor.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from axonlaunch.models.adapters.lora import LoraLayer
from axonlaunch.models.tensors.packed_blocks import logical_shape


@dataclass(frozen=True)
class LinearSizes:
    """The sizes of a linear layer.

    Attributes:
        inputs: Number of input features.
        outputs: Number of output features.
        transposed: Whether the weight has shape [inputs, outputs], as in GPT-2's Conv1D.
    """

    inputs: int
    outputs: int
    transposed: bool = False


def linear_sizes(module: nn.Module) -> LinearSizes | None:
    """Return the sizes of a module that computes ``x @ weight.T + bias``; None for all others."""
    weight = module._parameters.get("weight")
    if weight is None or not set(module._parameters) <= {"weight", "bias"}:
        return None
    shape = logical_shape(weight)
    if len(shape) != 2:
        return None
    if module._modules and not isinstance(module, LoraLayer):
        return None
    cls = module.base_class if isinstance(module, LoraLayer) else type(module)
    transposed = _is_linear(cls, module)
    if transposed is None:
        return None
    outputs, inputs = reversed(shape) if transposed else shape
    return LinearSizes(inputs, outputs, transposed)


def is_embedding(module: nn.Module) -> bool:
    """Return whether a module looks up rows and processes each row independently of the others."""
    if not isinstance(module, nn.Embedding):
        return False
    if module.max_norm or module.scale_grad_by_freq or module.sparse:
        return False
    cls = type(module)
    return cls.forward is nn.Embedding.forward or _looks_up(module)


_linear: dict[type[nn.Module], bool | None] = {}


def _is_linear(cls: type[nn.Module], module: nn.Module) -> bool | None:
    """Return whether the weight of a linear layer is transposed; None if it is not linear."""
    if cls.forward is nn.Linear.forward:
        return False
    if isinstance(module, ColumnParallelLinear | RowParallelLinear):
        return None
    if not (issubclass(cls, nn.Linear) or hasattr(module, "nf")):
        return None
    if cls not in _linear:
        orientations = [
            transposed for transposed in (False, True) if _computes_linear(cls, module, transposed)
        ]
        _linear[cls] = orientations[0] if orientations else None
    return _linear[cls]


def _computes_linear(cls: type[nn.Module], module: nn.Module, transposed: bool) -> bool:
    """Compare a small copy of a module with ``F.linear`` on a few numbers."""
    inputs, outputs = 3, 2
    weight = torch.arange(1.0, 7.0, device="cpu").view(outputs, inputs)
    bias = torch.arange(7.0, 9.0, device="cpu")
    x = torch.arange(12.0, device="cpu").view(1, 4, inputs)
    trial = copy.copy(module)
    trial.__class__ = cls  # without its adapter
    trial_weight = weight.t().contiguous() if transposed else weight
    trial.__dict__["_parameters"] = {
        "weight": nn.Parameter(trial_weight),
        "bias": nn.Parameter(bias),
    }
    sizes = {"in_features": inputs, "out_features": outputs, "nx": inputs, "nf": outputs}
    trial.__dict__.update({key: size for key, size in sizes.items() if hasattr(module, key)})
    try:
        with torch.no_grad():
            result: Any = trial.forward(x)
    except Exception:  # user code may raise any exception
        return False
    return isinstance(result, Tensor) and torch.equal(result, F.linear(x, weight, bias))


def _looks_up(module: nn.Embedding) -> bool:
    """Return whether a subclass's forward delegates the lookup to ``nn.Embedding``."""
    lookups: list[Tensor] = []
    trial = copy.copy(module)
    cls: Any = type(module)
    trial.__class__ = _watched_class(cls)
    trial.__dict__["_parameters"] = {"weight": nn.Parameter(torch.ones(2, 3, device="cpu"))}
    trial.__dict__["lookups"] = lookups
    entries = torch.tensor([[0, 1, 1]], device="cpu")
    try:
        with torch.no_grad():
            rows: Any = trial.forward(entries)
    except Exception:  # user code may raise any exception
        return False
    return len(lookups) == 1 and lookups[0] is entries and rows.shape == (1, 3, 3)


@functools.cache
def _watched_class(cls: Any) -> Any:
    def forward(self: Any, entries: Tensor) -> Tensor:
        self.lookups.append(entries)
        return F.embedding(entries, self.weight)

    watch = type("_Watch", (nn.Embedding,), {"forward": forward})
    return type(cls.__name__, (cls, watch), {})
