"""The estimate of a run, made beside it at the lowest priority, or read from the cache.

It begins with the first logged step, so that it delays none, and what is not ready when the run has
ended is waited for: every summary has the estimated peak beside the measured one.
"""

from __future__ import annotations

import dataclasses

from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.hardware import HardwareConfig
from axonlaunch.planning import estimate_cache
from axonlaunch.planning.records import Estimate
from axonlaunch.planning.tracing.shape_only_data import replace_with_synthetic
from axonlaunch.system import forked_call, forkserver

PATIENCE_S = 60.0
"""Seconds after the run's end in which it is waited for."""


class BackgroundEstimate:
    """The estimated peak memory of a run's highest rank.

    Attributes:
        estimate: None until it is known.
        reason: Why it is not known.
        traceback: Of the failure that is the reason, where it was one of the estimate's own code.
    """

    def __init__(self, context: forkserver.Starter, config: RunConfig) -> None:
        """Look for the estimate of a run; nothing is started yet.

        Args:
            context: What starts the process that traces: the warm fork server, or, in a rank that
                another launcher started, a new interpreter.
            config: Checked, with ``launch.nproc`` resolved.
        """
        self._context = context
        self._config = named = replace_with_synthetic(config)
        if config.launch.device != "cuda":  # on no GPU no allocator has a cache to estimate
            self._config = dataclasses.replace(named, hardware=HardwareConfig(name="cpu"))
        self._call: forked_call.ForkedCall | None = None
        self._is_hopeless = False
        self.estimate: Estimate | None = None
        self.reason, self.traceback = "no step was done", ""
        if (
            cached := estimate_cache.read_estimate(self._config)
            or estimate_cache.read_estimate(named)
        ) is not None:
            self._take(cached)

    def close(self) -> None:
        """Give up what is not ready, and leave no process behind."""
        call, self._call = self._call, None
        if call is not None:
            call.end()

    def begin(self) -> None:
        """Begin to trace, unless it was begun or is known; called at every logged step."""
        if self.estimate is not None or self._call is not None or self._is_hopeless:
            return
        self.reason = "the estimate was not ready when the run had ended"
        try:
            self._call = forked_call.ForkedCall(
                self._context, "axonlaunch.planning.estimate:trace_beside", (self._config,)
            )
        except (forkserver.ForkServerError, OSError) as error:
            self.reason = str(error)  # the run needs no estimate
            self._is_hopeless = True

    def wait(self, seconds: float = PATIENCE_S) -> None:
        """Wait until it is known, or why it can't be; Ctrl-C gives it up."""
        if self._call is None:
            return
        try:
            if not self._call.is_ready(within_s=seconds):
                return
            error = self._call.receive()
        except KeyboardInterrupt:
            return
        if error is None:
            estimate_cache.write_estimate(self._config, self._call.result)
            self._take(self._call.result)
        elif isinstance(error, ConfigError):
            self.reason = str(error)
        else:
            self.reason = f"{type(error).__name__}: {error}"
            self.traceback = str(error.__cause__ or "")

    def _take(self, estimate: Estimate) -> None:
        self.estimate, self.reason = estimate, ""
