"""Builds a user's model from an import path.

Import errors and results that are not modules are reported as ``ConfigError``. Errors of the
builder itself are passed through.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from axonlaunch.config.code.plugins import import_callable
from axonlaunch.config.options.model import CustomConfig
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import ModelSpec


def build_custom_model(config: CustomConfig) -> nn.Module:
    """Import ``target`` and call it with the arguments.

    Raises:
        ConfigError: The target can't be imported or called with these arguments, or does not return
            a module.
    """
    module = import_callable("model.target", config.target, config.arguments)(**config.arguments)
    if not isinstance(module, nn.Module):
        message = f"returned {type(module).__name__}; return a torch.nn.Module"
        raise ConfigError([ConfigIssue("model.target", message, config.target)])
    return module


SPEC = ModelSpec(
    build=build_custom_model,
    loss=cross_entropy_sum,
    inputs="any",
    adapt=lambda spec, config: replace(spec, layers=config.layers),
)
