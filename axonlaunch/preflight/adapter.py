"""What a run's adapter is, and why a model can't have it; a folder of PEFT's may say it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from axonlaunch.checkpoint import adapters
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.models.lora import adapter_problems
from axonlaunch.models.spec import ModelSpec


def with_adapter_settings(config: RunConfig) -> RunConfig:
    """Return a run whose adapter is as its ``adapter.path`` has it, if there is one.

    Raises:
        ConfigError: The folder can't be read, holds something else, or contradicts the run.
    """
    if config.adapter is None or config.adapter.path is None:
        return config
    folder = adapters.read_peft(Path(config.adapter.path))
    adapter, problems = adapters.with_peft_settings(config, folder)
    if problems:
        raise ConfigError(problems)
    return with_values(config, {"adapter": adapter})


def find_adapter_problems(
    config: RunConfig, spec: ModelSpec, model: nn.Module
) -> Iterator[ConfigIssue]:
    """Yield why a run's model can't have its adapter.

    Args:
        config: As ``with_adapter_settings`` returns it.
        spec: The model's.
        model: Whole, with its adapters, on ``meta`` or not.
    """
    if config.adapter is None:
        return
    issues = list(adapter_problems(model, config.adapter, spec))
    yield from issues
    if issues or config.adapter.path is None:
        return
    named = dict(model.named_parameters())
    names = adapters.peft_names(named)
    sizes = {key: tuple(named[name].shape) for name, key in names.items()}
    shapes = adapters.read_peft(Path(config.adapter.path)).shapes
    for name in {**shapes, **sizes}:
        if shapes.get(name) != sizes.get(name):
            its, other = (list(found.get(name, ())) or "absent" for found in (shapes, sizes))
            message = f"its {name} is {its}; the model's is {other}"
            yield ConfigIssue("adapter.path", message, config.adapter.path)
            return
