"""Base class of users' callbacks, and the state that they get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


def find_class_problem(builder: Any) -> str:
    """Return why a class is no callback; empty if it is one, or is a function."""
    if not isinstance(builder, type):
        return ""
    if not issubclass(builder, Callback):
        return "is no callback; derive the class from axonlaunch.Callback"
    moments = [name for name in vars(Callback) if not name.startswith("_")]
    if all(getattr(builder, name) is getattr(Callback, name) for name in moments):
        return f"must define one of the methods {', '.join(moments)}"
    return ""
