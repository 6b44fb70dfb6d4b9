"""How a logger joins: ``register_logger``, in a plug-in or in a package that offers it.

The table itself is ``config.loggers``'s; what is listed is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from axonlaunch.config.loggers import LOGGERS

_Builder = TypeVar("_Builder", bound=Callable[..., Any])


def register_logger(
    name: str, *, config: type | None = None, summary: str | None = None
) -> Callable[[_Builder], _Builder]:
    """Register a ``Logger``, or a function that makes one, as ``loggers=[NAME]``.

    Args:
        name: The name.
        config: Dataclass with a field ``name`` that types ``{name: NAME, ...}`` in the list; what
            is decorated is called with one. None: it is called with the keys of ``arguments``.
        summary: One line for ``axonlaunch ls loggers``; None: the docstring's first.

    Raises:
        ValueError: The name is taken, or the configuration is no dataclass with a name.
    """
    return LOGGERS.register(name, config=config, summary=summary)
