"""Registers exchanges between experts from plug-ins and packages, with ``register_dispatch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from axonlaunch.config.options.data_parallel import DISPATCHES
from axonlaunch.engines.expert.dispatch import Dispatch

_Builder = TypeVar("_Builder", bound=Callable[..., Dispatch])


def register_dispatch(name: str, *, summary: str | None = None) -> Callable[[_Builder], _Builder]:
    """Register a class as ``strategy.expert.dispatch=NAME``.

    It is called with the group of the ranks that share the experts of a layer and with their number
    ``num_experts=``, and has the methods of ``Dispatch``.

    Args:
        name: Name of the dispatch.
        summary: One line for ``axonlaunch ls dispatches``; None for the docstring's first line.

    Raises:
        ValueError: The name is taken.
    """

    def register(builder: _Builder) -> _Builder:
        described = summary or (builder.__doc__ or f"from {builder.__module__}").splitlines()[0]
        DISPATCHES.add(name, builder, summary=described)
        return builder

    return register
