"""Collects the facts about parameters that optimizers need: names, shapes, hidden matrices.

The model must be unsharded, on any device, and is not changed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Self

from torch import nn

from axonlaunch.config import RunConfig
from axonlaunch.config.optimization.optimizer_states import ParameterFacts
from axonlaunch.config.optimization.parameter_groups import state_bytes
from axonlaunch.config.precision import PRECISIONS, master_format
from axonlaunch.models.adapters.expert_lora import LoraExperts
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.models.facts.flops import active_experts, looked_up_parameters, tied_parameters
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.models.tensors.packed_blocks import logical_numel

_FP32 = 4
"""Bytes of an element of an adapter, or of other parameters that are trained together with it."""


def parameter_facts(spec: ModelSpec, model: nn.Module) -> dict[str, ParameterFacts]:
    """Return the facts of every trained parameter by name; tied parameters appear once.

    Args:
        spec: Spec of the model, which names its repeated blocks.
        model: Unsharded model.
    """
    blocks = tuple(f"{name}." for name in spec.blocks(model))
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    modules = [model.get_submodule(name) for name in spec.experts(model)]
    experts = {id(parameter) for each in modules for parameter in each._parameters.values()}
    # An adapter of experts has the matrices of all of them side by side.
    combined = {
        id(parameter)
        for each in modules
        if isinstance(each, LoraExperts)
        for matrices in each.matrices().values()
        for parameter in matrices.parameters()
    }
    return {
        name: ParameterFacts(
            name=name,
            shape=tuple(parameter.shape),
            # Experts have a matrix, or a vector, for each of them.
            is_hidden_matrix=parameter.ndim == (3 if id(parameter) in experts else 2)
            and name.startswith(blocks)
            and id(parameter) not in tables | combined,
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


LARGE = 4 * 2**20
"""Size in bytes from which ZeRO-1 gathers a parameter separately, directly into its storage."""


@dataclass(frozen=True)
class TrainingShares:
    """Memory of training relative to the bytes of a model's parameters.

    Attributes:
        gradients: Bytes of gradients: 1, or less if parameters are frozen.
        states: Bytes of optimizer states; 2 for AdamW.
        small: Bytes of parameters smaller than ``LARGE``.
        looked_up: Bytes of parameters that no matrix product uses (embeddings).
        experts: Bytes of parameters of experts that can be divided among ranks.
        active_experts: Fraction of a layer's experts that one token uses.
        quantized: Bytes of quantized parameters, which are never cast as a whole.
        dequantized: Bytes to read the largest quantized parameter: its values in the compute type,
            and copies of its codes and scales.
        tied: Bytes of embeddings that the head uses, too.
    """

    gradients: float = 1.0
    states: float = 2.0
    small: float = 1.0
    looked_up: float = 0.0
    experts: float = 0.0
    active_experts: float = 1.0
    quantized: float = 0.0
    dequantized: float = 0.0
    tied: float = 0.0

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the shares for a run.

        Raises:
            ConfigError: The model can't be built, or the optimizer can't be tried out.
        """
        return cls(*_shares(_SharesKey(config)))


@dataclass(frozen=True)
class _SharesKey:
    """Cache key: runs are equal if all settings that the shares depend on are equal."""

    config: RunConfig

    @property
    def _fingerprint(self) -> str:
        config = self.config
        train = config.train
        settings = (
            *(train.param_dtype, train.grad_dtype, train.freeze, train.unfreeze),
            train.precision,
        )
        return repr((config.model, config.adapter, config.optimizer, config.seed, settings))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SharesKey) and self._fingerprint == other._fingerprint

    def __hash__(self) -> int:
        return hash(self._fingerprint)


@functools.cache
def _shares(key: _SharesKey) -> tuple[float, ...]:
    config = key.config
    element = config.train.parameter_bytes
    model = on_meta(config, seed=config.seed)
    spec = spec_for(config)
    facts = parameter_facts(spec, model)
    total_bytes = max(1, stored_bytes(model, element=element))
    trained = element if config.adapter is None else _FP32
    gradient = config.train.gradient_bytes if config.adapter is None else _FP32
    gradients = gradient * sum(p.numel() for p in model.parameters() if p.requires_grad)
    states = state_bytes(config.optimizer, facts.values(), parameter_bytes=trained)
    experts = sum(
        stored_bytes(model.get_submodule(name), element=element) for name in spec.experts(model)
    )
    small, looked_up = small_bytes(model, element=element), element * looked_up_parameters(model)
    quantized = [p for p in model.parameters() if not p.is_floating_point()]
    compute = PRECISIONS[config.train.precision].compute.nbytes
    return (
        gradients / total_bytes,
        states / total_bytes,
        small / total_bytes,
        looked_up / total_bytes,
        experts / total_bytes,
        active_experts(model),
        sum(p.nbytes for p in quantized) / total_bytes,
        max((p.nbytes + compute * logical_numel(p) for p in quantized), default=0) / total_bytes,
        element * tied_parameters(model) / total_bytes,
    )


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of a checkpoint: saved weights, persistent buffers and optimizer states.

    Raises:
        ConfigError: The model can't be built, or the optimizer can't be tried out.
    """
    element = config.train.parameter_bytes
    trained = element if config.adapter is None else _FP32
    # A checkpoint has masters, which count as states, in place of the weights.
    of_trained = 0 if master_format(config.optimizer) is not None else trained
    model = on_meta(config, seed=config.seed)
    saved = [
        _bytes_of(parameter, of_trained if parameter.requires_grad else element)
        for parameter in model.parameters()
        if parameter.requires_grad or config.saves_frozen
    ]
    names = model.state_dict().keys()
    buffers = [buffer.nbytes for name, buffer in model.named_buffers() if name in names]
    facts = parameter_facts(spec_for(config), model)
    states = state_bytes(config.optimizer, facts.values(), parameter_bytes=trained)
    return sum(saved) + sum(buffers) + states


def small_bytes(model: nn.Module, *, element: int) -> int:
    """Return the total bytes of all parameters smaller than ``LARGE``.

    Args:
        model: Model with the parameters.
        element: Bytes of one element.
    """
    sizes = (_bytes_of(parameter, element) for parameter in model.parameters())
    return sum(size for size in sizes if size < LARGE)


def stored_bytes(model: nn.Module, *, element: int) -> int:
    """Return the total bytes of all parameters; quantized ones take fewer than the others.

    Args:
        model: Model with the parameters.
        element: Bytes of one element of a parameter that is not quantized.
    """
    return sum(_bytes_of(parameter, element) for parameter in model.parameters())


def _bytes_of(parameter: nn.Parameter, element: int) -> int:
    return parameter.numel() * (element if parameter.is_floating_point() else parameter.itemsize)
