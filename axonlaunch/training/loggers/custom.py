"""Builds a user-defined logger from its import path.

Errors that the target raises are passed on.
"""

from __future__ import annotations

from typing import Any

from axonlaunch.config.code.plugins import import_target
from axonlaunch.config.options.loggers import CustomLoggerConfig


def make_custom(config: CustomLoggerConfig) -> Any:
    """Import ``target`` and call it with the arguments.

    Raises:
        ImportError: The target can't be imported.
        TypeError: The returned object has no method ``log``.
    """
    logger = import_target(config.target)(**config.arguments)
    if not callable(getattr(logger, "log", None)):
        raise TypeError(
            f"{config.target} returned {type(logger).__name__}, which has no log(metrics, *, step)"
        )
    return logger
