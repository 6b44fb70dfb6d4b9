"""Loggers, one per file, and ``RunLoggers``, which calls them on the main rank.

``metrics.jsonl`` and ``events.jsonl`` are written immediately. Every other logger runs in a
separate thread (``background``). Its first problem is reported, and training continues.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from axonlaunch.config import RunConfig, to_interpolations, to_tree
from axonlaunch.config.options.loggers import LOGGERS
from axonlaunch.config.problems.errors import failure_text
from axonlaunch.config.values.optional_keys import custom_target
from axonlaunch.events import (
    Evaluated,
    Event,
    Listener,
    Noted,
    StepLogged,
    perplexity_of,
)
from axonlaunch.system.storage.files import read_text, replace_text
from axonlaunch.system.storage.run_files import EVENTS, METRICS
from axonlaunch.system.text.units import Counted, named_by_unit
from axonlaunch.training.loggers import trainjob
from axonlaunch.training.loggers.background import BackgroundLogger
from axonlaunch.training.loggers.event_log import EventLog
from axonlaunch.training.loggers.jsonl import JSONLLogger
from axonlaunch.training.loggers.logger import Logger, Number, RunInfo

__all__ = ["Logger", "RunInfo", "RunLoggers"]

_STATE = "loggers.json"
_LARGEST = 1 << 20
_DRAIN_S = 30.0
"""Seconds that the end of a run waits for its loggers to send their queues."""


class RunLoggers:
    """Passes the main rank's events to ``metrics.jsonl``, then ``report``, then each logger.

    Loggers receive only events inside of the context.

    Attributes:
        notes: Notes to show about existing log files.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        world_size: int,
        resumed_at: int | None,
        report: Listener,
        counted: Counted = "tokens",
    ) -> None:
        """Open ``metrics.jsonl``.

        Args:
            config: Configuration of the run.
            world_size: Number of ranks of the run.
            resumed_at: Step of the checkpoint that was loaded; None if none was.
            report: Receives every event, and a note on each logger that fails.
            counted: Unit that the loss counts, used in names of metrics.

        Raises:
            OSError: The run folder can't be read or written.
        """
        folder = Path(config.run_dir)
        self._jsonl = JSONLLogger(folder / METRICS, resumed_at=resumed_at, counted=counted)
        self._events = EventLog(folder, world_size=world_size, counted=counted)
        self._report = report
        self._state = folder / _STATE
        last, ids, unreadable = _read_state(self._state) if resumed_at is not None else (0, {}, ())
        # Steps after the checkpoint may have been logged before the run was resumed.
        self._last = max(last, self._jsonl.last_step)
        self.notes = (*self._jsonl.notes, *unreadable)
        self._configs = [logger for logger in config.loggers if logger.name != "jsonl"]
        self._run = RunInfo(
            name=config.name,
            run_dir=folder,
            config=to_interpolations(to_tree(config)),
            resumed_at=resumed_at,
            ids=ids,
            counted=counted,
        )
        self._drain_s = min(_DRAIN_S, config.launch.timeout_s / 2)
        self._writing_state = threading.Lock()
        self._loggers: list[BackgroundLogger] = []
        self._is_events_reported = False

    def __call__(self, event: Event) -> None:
        """Write an event and pass it on."""
        self._jsonl(event)
        self._log_event(event)
        self._report(event)
        self._report_problems()
        if not isinstance(event, StepLogged | Evaluated):
            return
        numbers = named_by_unit(_numbers(event), self._run.counted)
        for logger in self._loggers:
            logger.log(dict(numbers), step=event.step)

    def __enter__(self) -> RunLoggers:
        """Start the thread of every logger."""
        for config in self._configs:
            name = custom_target(config) or config.name
            self._start(name, partial(_make_logger, config))
        if trainjob.URL in os.environ:
            self._start("TrainJob status", partial(trainjob.TrainJobLogger, os.environ))
        return self

    def _start(self, name: str, make: Callable[[], Any]) -> None:
        logger = BackgroundLogger(
            name, make, run=self._run, last_step=self._last, started=self._save_state
        )
        self._loggers.append(logger)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Wait until the loggers have sent their queues, up to a common time limit."""
        failed = kind is not None
        deadline = time.monotonic() + self._drain_s
        for logger in self._loggers:
            logger.begin_close(failed=failed)
        for logger in self._loggers:
            logger.close(deadline=deadline)
        self._report_problems()

    def _log_event(self, event: Event) -> None:
        try:
            self._events(event)
        except Exception as error:  # a full disk, or a number that JSON does not have
            if not self._is_events_reported:
                self._is_events_reported = True
                reason = failure_text(error)
                self._report(
                    Noted(f"loggers: {EVENTS} can't be written, and training continues: {reason}")
                )

    def _report_problems(self) -> None:
        for logger in self._loggers:
            if (problem := logger.take_problem()) is not None:
                note = Noted(problem)
                self._log_event(note)
                self._report(note)

    def _save_state(self) -> None:
        """Write the last logged step and the ids assigned by services; a resumed run reads them."""
        with self._writing_state:
            content = {"last_step": self._last, "ids": dict(self._run.ids)}
            replace_text(self._state, json.dumps(content) + "\n")


def _make_logger(config: Any) -> Any:
    return LOGGERS.get(config.name)(config)


def _numbers(event: StepLogged | Evaluated) -> dict[str, Number]:
    """Return the numeric fields of an event by name."""
    fields = asdict(event).items()
    numbers = {k: v for k, v in fields if k != "step" and isinstance(v, int | float)}
    if isinstance(event, Evaluated):
        numbers |= {f"eval_{name}": value for name, value in event.metrics.items()}
        for name, loss in event.sources.items():
            numbers |= {f"eval_loss/{name}": loss, f"perplexity/{name}": perplexity_of(loss)}
    return numbers


def _read_state(state: Path) -> tuple[int, dict[str, str], tuple[str, ...]]:
    """Return the last logged step, the loggers' ids, and a note if the file can't be read."""
    try:
        content = json.loads(read_text(state, at_most=_LARGEST))
        return int(content["last_step"]), {str(k): str(v) for k, v in content["ids"].items()}, ()
    except FileNotFoundError:
        return 0, {}, ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        note = f"{state.name}: can't be read ({type(error).__name__}); loggers start new runs"
        return 0, {}, (note,)
