"""From a typed configuration to a module, in the steps that engines put their own between.

A configuration is a run's, which says what of the model is trained, or a model's alone. It shards
nothing: ``construct``, whatever an engine does, then ``initialize_weights``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from axonlaunch.config import RunConfig
from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.config.model import MODELS, HuggingFaceConfig
from axonlaunch.models.initialization import Staging, fill, initialize, materialize
from axonlaunch.models.lora import adapter_initializers, add_adapters, start_magnitudes
from axonlaunch.models.spec import ModelSpec
from axonlaunch.models.trained import choose_trained


def spec_for(config: Any) -> ModelSpec:
    """Return what engines must know of the model that a configuration describes.

    Raises:
        UnknownNameError: No model of that name is registered.
    """
    model = model_of(config)
    spec: ModelSpec = MODELS.get(model.name)
    spec = spec if spec.adapt is None else spec.adapt(spec, model)
    own = spec.initializers
    if own is None or not isinstance(config, RunConfig) or config.adapter is None:
        return spec
    return replace(spec, initializers=lambda part: {**own(part), **adapter_initializers(part)})


def model_of(config: Any) -> Any:
    """Return the typed configuration of the model, of a run's or of the model's own."""
    return config.model if isinstance(config, RunConfig) else config


def construct(config: Any, *, seed: int) -> nn.Module:
    """Build the module: on the meta device, or on the CPU where it starts itself.

    A module that starts itself draws from torch's global generator, which is seeded for it and
    put back afterwards, so every rank gets the same one.

    Raises:
        ConfigError: The configuration's figures don't fit each other.
    """
    refuse_problems(config)
    spec = spec_for(config)
    if spec.initializers is not None:
        with torch.device("meta"):
            return _call_builder(spec, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _call_builder(spec, config)


def on_meta(config: Any, *, seed: int) -> nn.Module:
    """Build the module without storage, also one that starts itself: its names and shapes.

    One that computes with values while it is built is built with them, which are then dropped.

    Raises:
        ConfigError: The configuration's figures don't fit each other.
    """
    refuse_problems(config)
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
        ConfigError: It returns no module.
    """
    model = model_of(config)
    module: Any = spec.build(model)
    if not isinstance(module, nn.Module):
        message = f"its builder returned {type(module).__name__}, not an nn.Module"
        raise ConfigError([ConfigIssue("model.name", message, model.name)])
    if isinstance(config, RunConfig):
        if config.adapter is not None:
            add_adapters(module, config.adapter, spec)
            if spec.initializers is None:
                _fill_adapters(module, seed=config.seed)
        choose_trained(module, config.train)
    return module


@torch.no_grad()
def _fill_adapters(module: nn.Module, *, seed: int) -> None:
    """Give the adapters of a module that starts itself their values, if the others have some."""
    starts, staging = adapter_initializers(module), Staging()
    for name, parameter in module.named_parameters():
        if name in starts and not parameter.is_meta:
            fill(parameter, starts[name], seed=seed, name=name, staging=staging)
    if not any(parameter.is_meta for parameter in module.parameters()):
        start_magnitudes(module)


def initialize_weights(
    module: nn.Module, config: Any, *, seed: int, device: torch.device | str
) -> None:
    """Move what ``construct`` built, sharded by now or not, to its device with initial weights.

    A module that starts itself has its weights and is only moved.

    Args:
        module: The whole one, or what an engine made of it; parameters may be DTensors on meta.
        config: Of the run, or of its model alone.
        seed: From which any layout draws the same weights.
        device: Where parameters and buffers are afterwards.
    """
    spec = spec_for(config)
    if spec.initializers is None:
        module.to(device)
        return
    materialize(module, device=device)
    initialize(module, seed=seed, initializers=spec.initializers(module))
    start_magnitudes(module)


def build_model(config: Any, *, seed: int = 0, device: torch.device | str = "cpu") -> nn.Module:
    """Build a whole module on one device, with the weights that any layout would start from."""
    module = construct(config, seed=seed)
    initialize_weights(module, config, seed=seed, device=device)
    return module


def initial_weights(config: Any) -> tuple[str, str] | None:
    """Return the key that names saved weights to start from, and where they are; None: the seed.

    Raises:
        ConfigError: They are a model's of the Hub, and not in its cache.
    """
    config = model_of(config)
    if (path := getattr(config, "weights", None)) is not None:
        return "model.weights", path
    if isinstance(config, HuggingFaceConfig) and config.init == "pretrained":
        from axonlaunch.models.hf import files

        return "model.path", str(files.folder(config))
    return None


def refuse_problems(config: Any) -> None:
    """Raise for figures that don't fit each other.

    Raises:
        ConfigError: It says which.
    """
    config = model_of(config)
    problems: list[tuple[str, str]] = getattr(config, "problems", list)()
    if problems:
        raise ConfigError(
            [
                ConfigIssue(f"model.{name}", message, getattr(config, name))
                for name, message in problems
            ]
        )
