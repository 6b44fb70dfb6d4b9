"""Runs a logger in a thread, so that training never waits for it.

Numbers wait in a bounded queue. A logger that keeps failing is switched off; the first problem of
each logger is kept for the caller to report.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from axonlaunch.config.problems.errors import failure_text
from axonlaunch.training.loggers.logger import Number, RunInfo

MAX_FAILURES = 3
"""Failed calls in a row after which a logger is switched off."""
_PAUSES_S = (1.0, 5.0)
"""Seconds between a failed call and the next one, after the first and the second failure."""
_LATE_S = 30.0
"""Seconds after which a call that has not returned is reported."""
_POLL_S = 0.05
_MAX_WAITING = 4096
"""Logged steps and evaluations that wait for a slow logger; later ones are dropped."""


class BackgroundLogger:
    """One logger and the thread that makes, starts, calls and closes it.

    Only the thread calls the logger. The other public methods are for the training
    thread; only ``close`` waits, until a deadline.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Any],
        *,
        run: RunInfo,
        last_step: int,
        started: Callable[[], None],
    ) -> None:
        """Start the thread.

        Args:
            name: Name of the logger in messages.
            make: Builds the logger; called in the thread, again if it fails.
            run: The run that is logged; the argument of the logger's ``start``.
            last_step: Last step that was logged before the run was resumed. A logger that can't
                rewind is not called with earlier steps.
            started: Called in the thread once the logger has started.
        """
        self.name = name
        self._make, self._run, self._started = make, run, started
        self._last_step = last_step
        self._changed = threading.Condition()
        self._waiting: deque[tuple[dict[str, Number], int]] = deque()
        self._dropped = 0
        self._failures = 0
        self._is_off = False
        self._closing: bool | None = None
        self._call: tuple[str, float] | None = None
        self._problem: str | None = None
        self._is_reported = False
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def log(self, metrics: dict[str, Number], *, step: int) -> None:
        """Queue the numbers of a step."""
        with self._changed:
            if self._is_off:
                return
            if len(self._waiting) < _MAX_WAITING:
                self._waiting.append((metrics, step))
                self._changed.notify()
            else:
                self._dropped += 1

    def take_problem(self) -> str | None:
        """Return the logger's first problem, but only once; None if there is none to report."""
        with self._changed:
            problem = self._problem
            if problem is None and self._call is not None and self._is_late():
                problem = (
                    f"has not answered for {_LATE_S:.0f} s ({self._call[0]}); training continues, "
                    f"and up to {_MAX_WAITING:,} logged steps wait for it"
                )
            if problem is None or self._is_reported:
                return None
            self._is_reported = True
            return f"loggers: {self.name} {problem}"

    def begin_close(self, *, failed: bool) -> None:
        """Tell the thread to close the logger after it has sent its queue.

        Args:
            failed: Whether training raised.
        """
        with self._changed:
            self._closing = failed
            self._changed.notify()

    def close(self, *, deadline: float) -> None:
        """Wait for the thread until a deadline, or until a call has run for ``_LATE_S`` seconds.

        Then a logger that still works is abandoned.

        Args:
            deadline: Time in ``time.monotonic()``.
        """
        while self._thread.is_alive() and time.monotonic() < deadline and not self._is_late():
            if self._is_off:
                return
            self._thread.join(_POLL_S)
        with self._changed:
            if self._thread.is_alive():
                work = "its work" if self._call is None else f"a call ({self._call[0]})"
                self._note(
                    f"did not finish {work} in the time that the end of a run waits for it; the "
                    f"{len(self._waiting):,} logged steps or evaluations in its queue are lost"
                )
            elif self._dropped:
                self._note(
                    f"was slower than training: {self._dropped:,} logged steps or evaluations are "
                    "missing from it; a larger train.log_every logs less often"
                )
            self._is_off = True

    def _work(self) -> None:
        logger = None
        while logger is None:
            logger = self._attempt("when it was started", self._start)
            if self._is_off or (logger is None and self._closing is not None):
                return
        rewinds = getattr(logger, "rewinds", False)
        while (item := self._next()) is not None:
            metrics, step = item
            if step >= self._last_step or rewinds:
                self._attempt(f"at step {step}", partial(logger.log, metrics, step=step))
            if self._is_off:
                return
        if hasattr(logger, "close"):
            self._attempt("when it was closed", partial(logger.close, failed=bool(self._closing)))

    def _start(self) -> Any:
        logger = self._make()
        if not callable(getattr(logger, "log", None)):
            kind = type(logger).__name__
            raise TypeError(f"it was built as {kind}, which has no log(metrics, *, step)")
        if hasattr(logger, "start"):
            logger.start(self._run)
        self._started()
        return logger

    def _next(self) -> tuple[dict[str, Number], int] | None:
        """Wait for the next numbers; None if the log is closing and the queue is empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing is not None)
            return self._waiting.popleft() if self._waiting else None

    def _attempt(self, when: str, call: Callable[[], Any]) -> Any:
        """Call the logger; after a failure, pause before returning None."""
        with self._changed:
            self._call = (when, time.monotonic())
        try:
            result = call()
        except (Exception, SystemExit) as error:  # loggers and their services may fail in any way
            with self._changed:
                self._call = None
                self._failures += 1
                self._note(
                    f"failed {when}, and training continues: {failure_text(error)}; after "
                    f"{MAX_FAILURES} failures in a row it is switched off"
                )
                if self._failures == MAX_FAILURES or self._is_off:
                    self._is_off = True
                    self._waiting.clear()
                else:
                    pause = _PAUSES_S[self._failures - 1]
                    self._changed.wait_for(lambda: self._closing is not None, pause)
            return None
        with self._changed:
            self._call = None
            self._failures = 0
        return result

    def _is_late(self) -> bool:
        call = self._call
        return call is not None and time.monotonic() - call[1] > _LATE_S

    def _note(self, problem: str) -> None:
        if self._problem is None:
            self._problem = problem
