"""Callbacks of users in the training loop: base class, state, and ``register_callback``.

The registry is ``config.options.training_hooks.CALLBACKS``.
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
from axonlaunch.config.code.plugins import import_target
from axonlaunch.config.options.training_hooks import CALLBACKS, CustomCallbackConfig
from axonlaunch.config.problems.errors import failure_text
from axonlaunch.config.values.optional_keys import custom_target

_Builder = TypeVar("_Builder", bound=Callable[..., Any])
Moment = Literal["start", "step", "evaluation", "save", "end"]


class CallbackError(Exception):
    """A callback raised an exception; the message names the callback."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of a run at one moment, the same on every rank except for ``rank`` and ``is_main``.

    Attributes:
        name: Name of the run.
        run_dir: Run folder.
        config: Configuration as nested plain values, as in ``config.yaml``. Changes have no effect.
        rank: Number of this rank.
        world_size: Number of ranks.
        is_main: Whether this is the rank that logs; others should write nothing.
        step: Number of optimizer steps done.
        steps: Number of steps of the run.
        epoch: Number of passes over the training rows; None for streams of unknown length.
        loss: Training loss of the last logged step; None before it.
        eval_loss: Loss of the last evaluation; None before it.
        metrics: Metrics of the last evaluation, by name.
        checkpoint: Folder of the last complete checkpoint of this start of the run; None before it.
        request_stop: Function that takes a reason. All ranks end training together after one of the
            next two steps, evaluate, and save a checkpoint if the run saves any.
    """

    name: str
    run_dir: Path
    config: Mapping[str, Any]
    rank: int
    world_size: int
    is_main: bool
    step: int
    steps: int
    epoch: float | None
    loss: float | None
    eval_loss: float | None
    metrics: Mapping[str, float]
    checkpoint: Path | None
    request_stop: Callable[[str], None]


class Callback:
    """Base class of callbacks. Every method is optional and does nothing by default.

    Every rank creates the callback and calls it at the same moments. An exception ends the run.
    A run that resumes creates its callbacks again; their attributes are not saved.
    """

    def start(self, run: RunState) -> None:
        """Run before the first step of this start."""

    def step(self, run: RunState) -> None:
        """Run after each optimizer step."""

    def evaluation(self, run: RunState) -> None:
        """Run after each evaluation."""

    def save(self, run: RunState) -> None:
        """Run after each complete checkpoint, ``run.checkpoint``."""

    def end(self, run: RunState) -> None:
        """Run after the last step, or after an early end, but not after an error."""


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
    """
    return CALLBACKS.register(name, config=config, summary=summary)


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
