"""The estimate of a run, made beside it at the lowest priority, or read from the cache.

It begins a while after the first step, so that it delays none and a short run does not pay for it;
what is not ready when the run ends is given up.
"""

from __future__ import annotations

import dataclasses
import time
from multiprocessing.context import ForkServerContext

from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.hardware import HardwareConfig
from axonlaunch.launch import forkserver
from axonlaunch.planning import cache
from axonlaunch.planning.record import Estimate
from axonlaunch.planning.unread import without_files

_WHILE_S = 5.0
"""Seconds after the first step: a run that ends before them would give the estimate up."""


class Prediction:
    """What a run's highest rank is foretold to hold.

    Attributes:
        peak_bytes: None until it is known.
        reason: Why it is not known.
    """

    def __init__(self, context: ForkServerContext | None, config: RunConfig) -> None:
        """Look for the estimate of a run; nothing is started yet.

        Args:
            context: Of the warm fork server; None: what the cache does not hold is not known.
            config: Checked, with ``launch.nproc`` resolved.
        """
        self._context = context
        self._config = named = without_files(config)
        if config.launch.backend != "nccl":  # on no GPU no allocator has a cache to foretell
            self._config = dataclasses.replace(named, hardware=HardwareConfig(name="cpu"))
        self._call: forkserver.Call | None = None
        self._first_step: float | None = None
        self.peak_bytes: int | None = None
        self.reason = "no step was done"
        if (kept := cache.read(self._config) or cache.read(named)) is not None:
            self._take(kept)

    def begin(self) -> None:
        """Begin to trace, unless it is early, done or impossible; called at every logged step."""
        if self.peak_bytes is not None or self._call is not None:
            return
        if self._context is None:
            self.reason = "another launcher started this rank, and it starts no process"
            return
        if self._first_step is None:
            self._first_step = time.monotonic()
        self.reason = "the run ended before it was estimated"
        if time.monotonic() - self._first_step < _WHILE_S:
            return
        self._call = forkserver.Call(
            self._context, "axonlaunch.launch.estimate:trace_beside", (self._config,)
        )

    def end(self) -> None:
        """Take what is ready and give up what is not."""
        call, self._call = self._call, None
        if call is None:
            return
        try:
            if not call.is_ready():
                return
            error = call.receive()
            if error is None:
                cache.write(self._config, call.result)
                self._take(call.result)
            elif isinstance(error, ConfigError):
                self.reason = str(error)
            else:
                self.reason = f"{type(error).__name__}: {error}"
        finally:
            call.end()

    def _take(self, found: Estimate) -> None:
        self.peak_bytes, self.reason = found.peak_bytes, ""
