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
    """
    return import_target(config.target)(**config.arguments)
