"""A user's own logger, named by where it is imported from.

It refuses what has no method ``log``; what the target itself raises passes through.
"""

from __future__ import annotations

from typing import Any

from axonlaunch.config.loggers import CustomLoggerConfig
from axonlaunch.config.plugins import import_target


def make_custom(config: CustomLoggerConfig) -> Any:
    """Import ``target`` and call it with the arguments.

    Raises:
        ImportError: It can't be imported.
        TypeError: It returns what has no method ``log``.
    """
    logger = import_target(config.target)(**config.arguments)
    if not callable(getattr(logger, "log", None)):
        raise TypeError(
            f"{config.target} returned {type(logger).__name__}, which has no log(metrics, *, step)"
        )
    return logger
