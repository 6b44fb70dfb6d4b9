"""Predicts a run's memory and step time beside it, at the lowest priority.

It begins with the first logged step, so that it delays none, and what is not ready when the run has
ended is waited for: every summary has the estimated peak beside the measured one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.hardware import HardwareConfig
from axonlaunch.planning import estimate_cache
from axonlaunch.planning.records import Estimate, StepPrediction
from axonlaunch.planning.throughput.run_hardware import hardware_of_run
from axonlaunch.planning.tracing.shape_only_data import replace_with_synthetic
from axonlaunch.system import forked_call, forkserver
from axonlaunch.system.forked_process import reason_of
from axonlaunch.system.run_files import ESTIMATE, STEP_TIME

PATIENCE_S = 60.0
"""Seconds after the run's end in which it is waited for."""
_Result = TypeVar("_Result")


class BackgroundCall(Generic[_Result]):
    """A function of a configuration, called in a process beside the run.

    Attributes:
        result: None until it is known.
        reason: Why it is not known.
        traceback: Of the failure that is the reason, where it was one of the function's own code.
    """

    def __init__(
        self,
        context: forkserver.Starter,
        target: str,
        config: RunConfig,
        *,
        keep: Callable[[_Result], None] = lambda result: None,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            context: What starts the process.
            target: The function, as ``forked_call`` takes it.
            config: Its argument.
            keep: Takes what it returned.
        """
        self._context = context
        self._target = target
        self._config = config
        self._keep = keep
        self._call: forked_call.ForkedCall | None = None
        self.result: _Result | None = None
        self.reason, self.traceback = "no step was done", ""
        self.is_over = False

    def settle(self, result: _Result | None, reason: str = "") -> None:
        """Set the result without a call, or the reason why there is none."""
        self.result, self.reason, self.is_over = result, reason, True

    def begin(self) -> None:
        """Begin, unless it was begun or is known."""
        if self.is_over or self._call is not None:
            return
        self.reason = "it was not ready when the run had ended"
        try:
            self._call = forked_call.ForkedCall(
                self._context, self._target, (self._config,), task="estimating this run"
            )
        except (forkserver.ForkServerError, OSError) as error:
            self.settle(None, str(error))  # the run needs none

    def wait(self, seconds: float) -> None:
        """Wait until it is known, or why it can't be; Ctrl-C gives it up."""
        if self._call is None or self.is_over:
            return
        try:
            if not self._call.is_ready(within_s=seconds):
                return
            error = self._call.receive()
        except KeyboardInterrupt:
            return
        if error is None:
            self._keep(self._call.result)
            self.settle(self._call.result)
        elif isinstance(error, ConfigError):
            self.settle(None, str(error))
        else:
            self.settle(None, reason_of(error))
            self.traceback = str(error.__cause__ or "")

    def close(self) -> None:
        """Give up what is not ready, and leave no process behind."""
        call, self._call = self._call, None
        if call is not None:
            call.end()


class BackgroundEstimate:
    """What is predicted of a run.

    Attributes:
        memory: The estimated peak memory of the highest rank, with its parts.
        step: The predicted time of a step, with its parts.
    """

    def __init__(self, context: forkserver.Starter, config: RunConfig) -> None:
        """Look for what is known of a run; nothing is started yet.

        Args:
            context: What starts the processes that trace: the warm fork server, or, in a rank that
                another launcher started, a new interpreter.
            config: Checked, with ``launch.nproc`` resolved.
        """
        named = on_its_devices = replace_with_synthetic(config)
        if config.launch.backend != "nccl":  # on no GPU no allocator has a cache to estimate
            on_its_devices = dataclasses.replace(named, hardware=HardwareConfig(name="cpu"))
        self.memory: BackgroundCall[Estimate] = BackgroundCall(
            context,
            "axonlaunch.planning.estimate:trace_beside",
            on_its_devices,
            keep=lambda estimate: estimate_cache.write_estimate(on_its_devices, estimate),
        )
        hardware, reason = hardware_of_run(config)
        self.step: BackgroundCall[StepPrediction] = BackgroundCall(
            context,
            "axonlaunch.planning.estimate:predict_step_beside",
            dataclasses.replace(config, hardware=hardware),
        )
        if hardware is None:
            self.step.settle(None, reason)
        if not config.estimate.background:
            self.memory.settle(None, "estimate.background=false")
            self.step.settle(None, "estimate.background=false")
        elif (cached := estimate_cache.read_estimate(on_its_devices)) is not None:
            self.memory.settle(cached)

    def close(self) -> None:
        """Give up what is not ready, and leave no process behind."""
        self.memory.close()
        self.step.close()

    def begin(self) -> None:
        """Begin, unless it was begun: one after the other; called at every logged step."""
        self.memory.begin()
        self.memory.wait(0)
        if self.memory.is_over:
            self.step.begin()
            self.step.wait(0)

    def wait(self, seconds: float = PATIENCE_S) -> None:
        """Wait until all is known, or why it can't be; Ctrl-C gives it up."""
        until = time.monotonic() + seconds
        self.memory.wait(seconds)
        if seconds:
            self.step.begin()
        self.step.wait(max(0.0, until - time.monotonic()))

    def files(self) -> dict[str, dict[str, Any]]:
        """Return what is known by now, by the file that holds it."""
        contents: dict[str, dict[str, Any]] = {}
        if self.memory.result is not None:
            contents[ESTIMATE] = dataclasses.asdict(self.memory.result)
        if self.step.result is not None:
            contents[STEP_TIME] = dataclasses.asdict(self.step.result)
        elif self.step.is_over:
            contents[STEP_TIME] = {"reason": self.step.reason}
        return contents
