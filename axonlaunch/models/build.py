"""Builds a module from a typed configuration, in steps that engines can act between.

The configuration is a run's, which also says which parameters are trained, or only a model's.
Nothing is sharded here. The order is ``construct``, then the engine's changes, then
``initialize_weights``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from axonlaunch.config import RunConfig
from axonlaunch.config.options.model import MODELS
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue, refuse_invalid
from axonlaunch.models.adapters.lora import (
    adapter_initializers,
    add_adapters,
    linear_layers,
    start_magnitudes,
)
from axonlaunch.models.adapters.quantized_base import quantize_base
from axonlaunch.models.specs.model_spec import ModelSpec, model_of
from axonlaunch.models.specs.trainable import choose_trainable
from axonlaunch.models.tensors.initialization import Staging, fill, initialize, materialize


def spec_for(config: Any) -> ModelSpec:
    """Return the spec of the model that a configuration describes.

    Raises:
        UnknownNameError: No model of that name is registered.
    """
    model = model_of(config)
    spec: ModelSpec = MODELS.get(model.name)
    spec = spec if spec.adapt is None else spec.adapt(spec, model)
    model_initializers = spec.initializers
    if model_initializers is None or not isinstance(config, RunConfig) or config.adapter is None:
        return spec
    return replace(
        spec, initializers=lambda part: {**model_initializers(part), **adapter_initializers(part)}
    )


def construct(config: Any, *, seed: int) -> nn.Module:
    """Build the module on the meta device, or on the CPU if it initializes itself.

    A module that initializes itself uses torch's global random generator. The generator is seeded
    first and restored afterwards, so every rank gets the same module.

    Raises:
        ConfigError: Values of the configuration contradict each other.
    """
    refuse_invalid("model", model_of(config))
    spec = spec_for(config)
    if spec.initializers is not None:
        with torch.device("meta"):
            return _call_builder(spec, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _call_builder(spec, config)


def on_meta(config: Any, *, seed: int) -> nn.Module:
    """Build the module without storage, only to read names and shapes.

    A module that needs values while it is built is built on the CPU first and then moved to meta.

    Raises:
        ConfigError: Values of the configuration contradict each other.
    """
    refuse_invalid("model", model_of(config))
    try:
        with torch.device("meta"):
            return _call_builder(spec_for(config), config)
    except (RuntimeError, NotImplementedError):
        module = construct(config, seed=seed)
        materialize(module, device="meta")
        return module


def _call_builder(spec: ModelSpec, config: Any) -> nn.Module:
    """Call a model's builder.

    Raises:
        ConfigError: The builder does not return a module.
    """
    model = model_of(config)
    module: Any = spec.build(model)
    if not isinstance(module, nn.Module):
        message = f"its builder returned {type(module).__name__}, not an nn.Module"
        raise ConfigError([ConfigIssue("model.name", message, model.name)])
    if isinstance(config, RunConfig):
        if config.adapter is not None:
            add_adapters(module, config.adapter, spec)
        choose_trainable(module, config.train)
        if config.adapter is not None and config.adapter.base is not None:
            layers = linear_layers(module, spec)
            quantize_base(module, config.adapter.base, spec, layers=layers)
        if config.adapter is not None and spec.initializers is None:
            _fill_adapters(module, seed=config.seed)
    return module


@torch.no_grad()
def _fill_adapters(module: nn.Module, *, seed: int) -> None:
    """Fill the adapters of a module that initializes itself, unless it is on the meta device."""
    initializers, staging = adapter_initializers(module), Staging()
    for name, parameter in module.named_parameters():
        if name in initializers and not parameter.is_meta:
            fill(parameter, initializers[name], seed=seed, name=name, staging=staging)
    if not any(parameter.is_meta for parameter in module.parameters()):
        start_magnitudes(module)


def initialize_weights(
    module: nn.Module, config: Any, *, seed: int, device: torch.device | str
) -> None:
    """Move a module from ``construct``, sharded or not, to its device with initial weights.

    A module that initializes itself already has its weights and is only moved.

    Args:
        module: The module, possibly changed by an engine; parameters may be DTensors on meta.
        config: Configuration of the run, or only of its model.
        seed: Seed of the weights, which are the same in any layout.
        device: Device of parameters and buffers afterwards.
    """
    spec = spec_for(config)
    if spec.initializers is None:
        module.to(device)
        return
    materialize(module, device=device)
    initialize(module, seed=seed, initializers=spec.initializers(module))
    start_magnitudes(module)


def build_model(config: Any, *, seed: int = 0, device: torch.device | str = "cpu") -> nn.Module:
    """Build an unsharded module on one device with its initial weights."""
    module = construct(config, seed=seed)
    initialize_weights(module, config, seed=seed, device=device)
    return module
