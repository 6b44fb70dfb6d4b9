"""Loggers, a file each, and what calls them on the main rank.

``metrics.jsonl`` is always written. What another logger raises is reported once, and ends nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from axonlaunch.config import RunConfig, to_tree
from axonlaunch.config.errors import failure_text
from axonlaunch.config.loggers import LOGGERS
from axonlaunch.events import (
    Evaluated,
    Event,
    Listener,
    Noted,
    StepLogged,
    perplexity_of,
)
from axonlaunch.system.files import read_text, replace_text
from axonlaunch.system.run_files import EVENTS, METRICS
from axonlaunch.training.loggers.base import Logger, Number, RunInfo
from axonlaunch.training.loggers.event_log import EventLog
from axonlaunch.training.loggers.jsonl import JSONLLogger

__all__ = ["Logger", "RunInfo", "RunLoggers"]

_STATE = "loggers.json"
_LARGEST = 1 << 20


class RunLoggers:
    """Takes the main rank's events: ``metrics.jsonl`` first, then who listens, then each logger.

    It is a context in which loggers are open; what it takes before, they do not see.

    Attributes:
        notes: What is to be said of the files that were there.
    """

    def __init__(
        self, config: RunConfig, *, world_size: int, resumed_at: int | None, report: Listener
    ) -> None:
        """Open ``metrics.jsonl``.

        Args:
            config: The run's.
            world_size: Its ranks.
            resumed_at: Steps done in the checkpoint that was loaded; None: none was.
            report: Takes every event, and a note of each logger that fails.

        Raises:
            OSError: The run folder can't be read or written.
        """
        folder = Path(config.run_dir)
        self._jsonl = JSONLLogger(folder / METRICS, resumed_at=resumed_at)
        self._events = EventLog(folder, world_size=world_size)
        self._report = report
        self._state = folder / _STATE
        last, ids, unreadable = _earlier(self._state) if resumed_at is not None else (0, {}, ())
        # What was logged before may be after the checkpoint that is resumed from.
        self._last = max(last, self._jsonl.last_step)
        self.notes = (*self._jsonl.notes, *unreadable)
        self._configs = [logger for logger in config.loggers if logger.name != "jsonl"]
        self._run = RunInfo(
            name=config.name,
            run_dir=folder,
            config=to_tree(config),
            resumed_at=resumed_at,
            ids=ids,
        )
        self._loggers: list[tuple[str, Any]] = []
        self._failed: set[str] = set()

    def __call__(self, event: Event) -> None:
        """Write an event and its numbers, and hand it on."""
        self._jsonl(event)
        self._attempt(EVENTS, "to be written", self._events, event)
        self._report(event)
        if not isinstance(event, StepLogged | Evaluated):
            return
        metrics, step = _numbers(event), event.step
        for name, logger in self._loggers:
            if step >= self._last or getattr(logger, "rewinds", False):
                self._attempt(name, f"at step {step}", logger.log, metrics, step=step)

    def __enter__(self) -> RunLoggers:
        """Begin every logger."""
        for config in self._configs:
            name = str(getattr(config, "target", config.name))
            self._attempt(name, "when it was started", self._start, name, config)
        if self._loggers:
            content = {"last_step": self._last, "ids": self._run.ids}
            replace_text(self._state, json.dumps(content) + "\n")
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """End every logger that began."""
        for name, logger in self._loggers:
            if hasattr(logger, "close"):
                self._attempt(name, "when it was closed", logger.close, failed=kind is not None)

    def _start(self, name: str, config: Any) -> None:
        logger = LOGGERS.get(config.name)(config)
        if hasattr(logger, "start"):
            logger.start(self._run)
        self._loggers.append((name, logger))

    def _attempt(
        self, name: str, when: str, call: Callable[..., None], *args: Any, **kw: Any
    ) -> None:
        """Call a logger; the first failure of each is reported."""
        try:
            call(*args, **kw)
        except Exception as error:  # a logger, or the service that it sends to, may fail in any way
            if name not in self._failed:
                self._failed.add(name)
                reason = failure_text(error)
                self._report(
                    Noted(f"loggers: {name} failed {when}, and training continues: {reason}")
                )


def _numbers(event: StepLogged | Evaluated) -> dict[str, Number]:
    """Return what of an event is a number, under the names of ``metrics.jsonl``."""
    fields = asdict(event).items()
    numbers = {k: v for k, v in fields if k != "step" and isinstance(v, int | float)}
    for name, loss in event.sources.items() if isinstance(event, Evaluated) else ():
        numbers |= {f"eval_loss/{name}": loss, f"perplexity/{name}": perplexity_of(loss)}
    return numbers


def _earlier(state: Path) -> tuple[int, dict[str, str], tuple[str, ...]]:
    """Return the last step that loggers saw before, the ids that they noted, and what is wrong."""
    try:
        content = json.loads(read_text(state, at_most=_LARGEST))
        return int(content["last_step"]), {str(k): str(v) for k, v in content["ids"].items()}, ()
    except FileNotFoundError:
        return 0, {}, ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        note = f"{state.name}: can't be read ({type(error).__name__}); loggers start new runs"
        return 0, {}, (note,)
