"""Callbacks of users in the training loop, and ``register_callback``.

Their base class is ``config.code.callback.Callback``, and the registry
``config.options.training_hooks.CALLBACKS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from axonlaunch.comm import World
from axonlaunch.comm.checks.json_exchange import all_gather_json
from axonlaunch.config import RunConfig, to_interpolations, to_tree
from axonlaunch.config.code.callback import Callback, RunState, find_class_problem
from axonlaunch.config.code.plugins import import_target
from axonlaunch.config.options.training_hooks import CALLBACKS, CustomCallbackConfig
from axonlaunch.config.problems.errors import failure_text
from axonlaunch.config.values.optional_keys import custom_target

_Builder = TypeVar("_Builder", bound=Callable[..., Any])
Moment = Literal["start", "step", "evaluation", "save", "end"]


class CallbackError(Exception):
    """A callback raised an exception; the message names the callback."""


@dataclass(kw_only=True)
class Callbacks:
    """The callbacks of a run on one rank.

    Attributes:
        named: Callbacks with their names in messages.
        facts: Fields of ``RunState`` that do not change.
        reasons: Reasons of requested stops on this rank.
    """

    named: Sequence[tuple[str, Callback]] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.named)

    def call(self, moment: Moment, **progress: Any) -> None:
        """Call every callback.

        Args:
            moment: Method to call.
            progress: Fields of ``RunState`` that change.

        Raises:
            CallbackError: A callback failed.
        """
        for name, callback in self.named:

            def request_stop(reason: str, name: str = name) -> None:
                self.reasons.append(f"{name}: {reason}")

            state = RunState(**self.facts, **progress, request_stop=request_stop)
            try:
                getattr(callback, moment)(state)
            except Exception as error:  # user code may fail in any way
                message = f"{name}: {moment}(run) failed with {failure_text(error)}"
                raise CallbackError(message) from error

    def first_reason(self) -> str:
        """Return the first reason of any rank for the end of the run; every rank calls this."""
        reasons = [self.reasons]
        if dist.is_initialized() and dist.get_world_size() > 1:
            reasons = all_gather_json(self.reasons)
        return next(reason for of_rank in reasons for reason in of_rank)


def register_callback(
    name: str, *, config: type | None = None, summary: str | None = None
) -> Callable[[_Builder], _Builder]:
    """Register a ``Callback``, or a function that returns one, as ``callbacks=[NAME]``.

    Args:
        name: Name in the list ``callbacks``.
        config: Dataclass with a field ``name`` that types ``{name: NAME, ...}`` in the list; the
            decorated object is called with an instance. None calls it with the keys of
            ``arguments``.
        summary: One line for ``axonlaunch ls callbacks``; None uses the docstring's first line.

    Raises:
        ValueError: The name is taken, or the configuration is not a dataclass with a name.
        TypeError: The decorated object is a class that is no callback.
    """
    register = CALLBACKS.register(name, config=config, summary=summary)

    def check_and_register(builder: _Builder) -> _Builder:
        if reason := find_class_problem(builder):
            raise TypeError(f"register_callback({name!r}): {builder.__name__} {reason}")
        return register(builder)

    return check_and_register


def build_callbacks(config: RunConfig, world: World) -> Callbacks:
    """Create this rank's callbacks of a run.

    Raises:
        CallbackError: A callback can't be created, or it lacks a method.
    """
    named = [
        (f"callbacks[{number}]={custom_target(callback) or callback.name}", callback)
        for number, callback in enumerate(config.callbacks)
    ]
    return Callbacks(
        named=[(name, _build(name, callback)) for name, callback in named],
        facts={
            "name": config.name,
            "run_dir": Path(config.run_dir),
            "config": MappingProxyType(to_interpolations(to_tree(config))),
            "rank": world.rank,
            "world_size": world.world_size,
            "is_main": world.is_main,
        },
    )


def _build(name: str, config: Any) -> Callback:
    try:
        callback: Any = CALLBACKS.get(config.name)(config)
    except Exception as error:  # user code may fail in any way
        raise CallbackError(f"{name}: creating it failed with {failure_text(error)}") from error
    if not isinstance(callback, Callback):
        kind = type(callback).__name__
        raise CallbackError(f"{name}: is a {kind}; derive its class from axonlaunch.Callback")
    return callback


def make_custom_callback(config: CustomCallbackConfig) -> Any:
    """Import ``target`` and call it with the arguments.

    Raises:
        ImportError: The target can't be imported.
    """
    return import_target(config.target)(**config.arguments)
