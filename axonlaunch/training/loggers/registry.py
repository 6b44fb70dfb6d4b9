"""Registers loggers from plug-ins and from packages with entry points.

The table of loggers is in ``config.options.loggers``. A logger is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from axonlaunch.config.options.loggers import LOGGERS

_Builder = TypeVar("_Builder", bound=Callable[..., Any])


def register_logger(
    name: str, *, config: type | None = None, summary: str | None = None
) -> Callable[[_Builder], _Builder]:
    """Register a ``Logger``, or a function that returns one, as ``loggers=[NAME]``.

    Args:
        name: Name in the list ``loggers``.
        config: Dataclass with a field ``name`` that types ``{name: NAME, ...}`` in the list; the
            decorated object is called with an instance. None calls it with the keys of
            ``arguments``.
        summary: One line for ``axonlaunch ls loggers``; None uses the docstring's first line.

    Raises:
        ValueError: The name is taken, or the configuration is not a dataclass with a name.
    """
    return LOGGERS.register(name, config=config, summary=summary)
