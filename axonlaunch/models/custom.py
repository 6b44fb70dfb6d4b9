"""A user's own builder, named by where it is imported from.

It refuses what can't be imported or is no module; what the builder itself raises passes through.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.config.model import CustomConfig
from axonlaunch.config.plugins import import_callable
from axonlaunch.models.loss import cross_entropy_sum
from axonlaunch.models.spec import ModelSpec


def build_custom_model(config: CustomConfig) -> nn.Module:
    """Import ``target`` and call it with the arguments.

    Raises:
        ConfigError: It can't be imported or called so, or does not return a module.
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
