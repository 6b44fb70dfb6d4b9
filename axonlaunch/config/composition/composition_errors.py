"""Turns errors of Hydra, OmegaConf and YAML into configuration errors of one line each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from axonlaunch.config.problems.errors import ConfigError, ConfigIssue

_UNSET = re.compile(r"Environment variable '(.*)' not found")


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Convert errors of Hydra, OmegaConf and YAML inside the block.

    Raises:
        ConfigError: Hydra, OmegaConf or YAML raised an error about files or overrides.
    """
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except ConfigError:
        raise
    except OmegaConfBaseException as error:
        raise ConfigError([_omegaconf_problem(error)]) from None
    except Exception as error:
        problem = _hydra_problem(error)
        if problem is None:
            raise
        raise ConfigError([problem]) from None


def _omegaconf_problem(error: Any) -> ConfigIssue:
    message = str(getattr(error, "msg", None) or error).splitlines()[0]
    if unset := _UNSET.search(message):
        message = f"the environment variable {unset[1]} is not set"
    return ConfigIssue(getattr(error, "full_key", None) or "", message)


def _hydra_problem(error: Exception) -> ConfigIssue | None:
    """Return a Hydra or YAML error as a problem of one line; None for other errors.

    Hydra keeps the reason of "Error merging override" in ``__cause__``.
    """
    from hydra.errors import HydraException
    from yaml import MarkedYAMLError, YAMLError

    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark
        location = f"{mark.name}:{mark.line + 1}:{mark.column + 1}: " if mark else ""
        hint = "; use spaces in place of the tab" if r"'\t'" in str(error.problem) else ""
        return ConfigIssue("", f"{location}not YAML: {error.problem}{hint}")
    if isinstance(error, UnicodeDecodeError | RecursionError | YAMLError | ValueError | IndexError):
        reason = " ".join(str(error).split())
        return ConfigIssue(
            "", f"the configuration can't be composed: {type(error).__name__}: {reason}"
        )
    if not isinstance(error, HydraException):
        return None
    lines = [(str(error).splitlines() or [type(error).__name__])[0].rstrip(".")]
    options = [line.strip() for line in str(error).splitlines() if line.startswith("\t")]
    provider = [line for line in options if "provider=" not in line]
    if provider:
        lines.append("known: " + ", ".join(provider))
    if error.__cause__ is not None:
        lines += str(error.__cause__).splitlines()[:1]
    return ConfigIssue("", "; ".join(lines))
