"""What of a model can't be traced, in words: the operation, and the module that it is in."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed.fsdp import FSDPModule

from axonlaunch.config import ConfigError, Problem, RunConfig

UNTRACEABLE = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
"""What torch raises for an operation that needs values, or that has no fake kernel."""


@contextmanager
def refusing_untraceable(config: RunConfig) -> Iterator[None]:
    """Refuse a run of which an operation needs values, or has no fake kernel.

    Raises:
        ConfigError: The operation, and the module it is in.
    """
    try:
        yield
    except UNTRACEABLE as error:
        raise ConfigError([_untraceable(config, error)]) from error


def _untraceable(config: RunConfig, error: BaseException) -> Problem:
    """Say which operation of which module needs values."""
    module = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = frame.f_locals.get("self")
        if isinstance(found, nn.Module):
            module = _name(found)
    where = "" if module is None else f" in {module}"
    message = (
        f"{_operation(error)}{where} depends on values or has no fake kernel, so memory "
        "can't be told without running it; axonlaunch estimate --formula tells what parameters, "
        "gradients and optimizer states take, and no more"
    )
    return Problem("model.name", message, config.model.name)


def _name(module: nn.Module) -> str:
    """Return the name of a module's class, as its user has written it."""
    kinds = (kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    return next(kinds).__name__


def _operation(error: BaseException) -> str:
    return str(getattr(error, "func", None) or error).removesuffix(".default")
