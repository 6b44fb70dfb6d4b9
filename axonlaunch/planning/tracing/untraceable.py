"""What of a model can't be traced, in words: what fails, and the module that it is in."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn
from torch.distributed.fsdp import FSDPModule

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.layout import Layout, num_ranks
from axonlaunch.models.build import spec_for
from axonlaunch.models.fake_tensor_cache import silence_fake_tensors
from axonlaunch.models.torch_internals import UNTRACEABLE
from axonlaunch.system.frame_origin import frame_owner


@contextmanager
def refusing_untraceable(config: RunConfig) -> Iterator[None]:
    """Refuse a run of which an operation needs values or has no fake kernel, or a module fails.

    Raises:
        ConfigError: What fails, and the module it is in.
    """
    silence_fake_tensors()
    if why := spec_for(config).untraceable:
        raise ConfigError([ConfigIssue("model.name", why, config.model.name)])
    try:
        yield
    except UNTRACEABLE as error:
        raise ConfigError([_untraceable(config, error)]) from error
    except ConfigError:
        raise
    except Exception as error:
        line = _users_line(error)
        if line is None and not config.strategy.tensor.plan:
            raise
        raise ConfigError([_failing(config, error, line)]) from error


def _untraceable(config: RunConfig, error: BaseException) -> ConfigIssue:
    """Say which operation of which module needs values."""
    module = _module(error)
    where = "" if module is None else f" in {module}"
    message = (
        f"{_operation(error)}{where} depends on values or has no fake kernel, so memory "
        "can't be estimated without running it; axonlaunch estimate --analytic estimates "
        "parameters, gradients and optimizer states only"
    )
    return ConfigIssue("model.name", message, config.model.name)


def _failing(config: RunConfig, error: BaseException, line: str | None) -> ConfigIssue:
    """Say which module of a user's failed, or of a model that a user's plan divides."""
    where = "" if (module := _module(error)) is None else f" in {module}"
    reason = f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]
    if line is None:
        message = f"the model, divided so, fails{where} with {reason}"
        return ConfigIssue("strategy.tensor.plan", message)
    samples = Layout.of(config, world_size=num_ranks(config)).micro_batch_size
    message = f"a micro-batch of {samples} fails{where} with {reason} ({line})"
    return ConfigIssue("model.name", message, config.model.name)


def _users_line(error: BaseException) -> str | None:
    """Return the last line of a model of others that an error passed; None: it passed none."""
    line = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if frame_owner(file) == "user":
            line = f"{Path(file).name}:{number}"
    return line


def _module(error: BaseException) -> str | None:
    """Return the innermost module that an error passed."""
    module = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        receiver = frame.f_locals.get("self")
        if isinstance(receiver, nn.Module):
            module = _name(receiver)
    return module


def _name(module: nn.Module) -> str:
    """Return the name of a module's class, as its user has written it."""
    kinds = (kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    return next(kinds).__name__


def _operation(error: BaseException) -> str:
    return str(getattr(error, "func", None) or error).removesuffix(".default")
