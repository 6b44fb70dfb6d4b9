"""Explains why a model cannot be traced: the failing operation and the module that contains it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn
from torch.distributed.fsdp import FSDPModule

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.models.build import spec_for
from axonlaunch.models.fake.fake_tensor_cache import silence_fake_tensors
from axonlaunch.models.torch_internals import UNTRACEABLE
from axonlaunch.system.frame_origin import frame_owner


@contextmanager
def refusing_untraceable(config: RunConfig) -> Iterator[None]:
    """Turn an error of tracing into a ``ConfigError`` that names the cause.

    Raises:
        ConfigError: An operation depends on values or has no fake kernel, or a module fails. The
            message names the operation or the error, and the module.
    """
    silence_fake_tensors()
    if reason := spec_for(config).untraceable:
        raise ConfigError([ConfigIssue("model.name", reason, config.model.name)])
    try:
        yield
    except UNTRACEABLE as error:
        raise ConfigError([_untraceable_issue(config, error)]) from error
    except ConfigError:
        raise
    except Exception as error:
        line = _user_line(error)
        if line is None and not config.strategy.tensor.plan:
            raise
        raise ConfigError([_failure_issue(config, error, line)]) from error


def _untraceable_issue(config: RunConfig, error: BaseException) -> ConfigIssue:
    module = _module(error)
    location = "" if module is None else f" in {module}"
    message = (
        f"{_operation(error)}{location} depends on values or has no fake kernel, so memory "
        "can't be estimated without running it; axonlaunch estimate --analytic estimates "
        "parameters, gradients and optimizer states only"
    )
    return ConfigIssue("model.name", message, config.model.name)


def _failure_issue(config: RunConfig, error: BaseException, line: str | None) -> ConfigIssue:
    """Describe the failure of a user's module, or of a model divided by a user's plan."""
    location = "" if (module := _module(error)) is None else f" in {module}"
    reason = f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]
    if line is None:
        message = f"sharded by this plan, the model fails{location} with {reason}"
        return ConfigIssue("strategy.tensor.plan", message)
    samples = Layout.of(config, world_size=num_ranks(config)).micro_batch_size
    message = f"a micro-batch of {samples} fails{location} with {reason} ({line})"
    return ConfigIssue("model.name", message, config.model.name)


def _user_line(error: BaseException) -> str | None:
    """Return the innermost line of user code in an error's traceback, if any."""
    line = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if frame_owner(file) == "user":
            line = f"{Path(file).name}:{number}"
    return line


def _module(error: BaseException) -> str | None:
    """Return the innermost module in an error's traceback."""
    module = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        receiver = frame.f_locals.get("self")
        if isinstance(receiver, nn.Module):
            module = _name(receiver)
    return module


def _name(module: nn.Module) -> str:
    """Return the name of a module's class, without the class that FSDP inserts."""
    classes = (cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))
    return next(classes).__name__


def _operation(error: BaseException) -> str:
    return str(getattr(error, "func", None) or error).removesuffix(".default")
