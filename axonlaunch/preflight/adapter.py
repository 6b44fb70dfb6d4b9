"""Reads the settings of a run's adapter from a PEFT folder and checks them against the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from axonlaunch.checkpoint.exchange import adapters
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.models.adapters.lora import adapter_problems
from axonlaunch.models.specs.model_spec import ModelSpec


def with_adapter_settings(config: RunConfig) -> RunConfig:
    """Return a configuration with the adapter settings in ``adapter.path``, if that is set.

    Raises:
        ConfigError: The folder can't be read, is not an adapter, or contradicts the configuration.
    """
    if config.adapter is None or config.adapter.path is None:
        return config
    folder = adapters.read_peft(Path(config.adapter.path))
    adapter, problems = adapters.with_peft_settings(config, folder)
    if problems:
        raise ConfigError(problems)
    more = [name for name in folder.full if name not in config.train.unfreeze]
    return with_values(
        config, {"adapter": adapter, "train.unfreeze": [*config.train.unfreeze, *more]}
    )


def find_adapter_problems(
    config: RunConfig, spec: ModelSpec, model: nn.Module
) -> Iterator[ConfigIssue]:
    """Yield the reasons why a run's model can't have its adapter.

    Args:
        config: Configuration returned by ``with_adapter_settings``.
        spec: Specification of the model.
        model: Complete model with its adapters, on the meta device or not.
    """
    if config.adapter is None:
        return
    issues = list(adapter_problems(model, config.adapter, spec))
    yield from issues
    if issues or config.adapter.path is None:
        return
    parameters = dict(model.named_parameters())
    folder = adapters.read_peft(Path(config.adapter.path))
    names = adapters.peft_names(parameters, full=folder.full)
    model_shapes = {key: tuple(parameters[name].shape) for name, key in names.items()}
    saved_shapes = folder.shapes
    for name in {**saved_shapes, **model_shapes}:
        if saved_shapes.get(name) != model_shapes.get(name):
            saved, expected = (
                list(shapes.get(name, ())) or "absent" for shapes in (saved_shapes, model_shapes)
            )
            message = f"its {name} is {saved}; the model's is {expected}"
            yield ConfigIssue("adapter.path", message, config.adapter.path)
            return
