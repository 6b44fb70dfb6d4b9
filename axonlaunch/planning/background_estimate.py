"""Predicts a run's peak memory and step time in low-priority processes while it trains.

Prediction begins at the first logged step. At the end of a run, ``wait`` gives it a limited time to
finish, so that the summary can show the estimated peak next to the measured one.
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
from axonlaunch.system.run_files import ESTIMATE, STEP_TIME

PATIENCE_S = 60.0
"""Seconds to wait for a prediction after the end of the run."""
_Result = TypeVar("_Result")


class BackgroundCall(Generic[_Result]):
    """A call of a function of the configuration in a separate process.

    Attributes:
        result: The returned value; None until the call has finished.
        reason: Why there is no result.
        traceback: Traceback of an unexpected error in the called function, else empty.
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
            context: Fork server, or another starter of processes.
            target: "package.module:function" to call.
            config: Argument of the call.
            keep: Callback that stores the result.
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
        """Set the result, or the reason for its absence, without a call."""
        self.result, self.reason, self.is_over = result, reason, True

    def begin(self) -> None:
        """Start the call, unless it was started or settled before."""
        if self.is_over or self._call is not None:
            return
        self.reason = "it was not ready when the run had ended"
        try:
            self._call = forked_call.ForkedCall(self._context, self._target, (self._config,))
        except (forkserver.ForkServerError, OSError) as error:
            self.settle(None, str(error))  # the run needs none

    def wait(self, seconds: float) -> None:
        """Wait for the result, or for an error. Ctrl-C abandons the call."""
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
            self.settle(None, f"{type(error).__name__}: {error}")
            self.traceback = str(error.__cause__ or "")

    def close(self) -> None:
        """Abandon unfinished calls and end their processes."""
        call, self._call = self._call, None
        if call is not None:
            call.end()


def _is_wanted(config: RunConfig) -> bool:
    """Return ``estimate.background``; by default only GPU runs have CPU cores to spare."""
    wanted = config.estimate.background
    return config.launch.backend == "nccl" if wanted is None else wanted


class BackgroundEstimate:
    """Predictions of a run's peak memory and step time, for its summary and report.

    Attributes:
        memory: Estimated peak memory of the highest rank, with its parts.
        step: Predicted time of a step, with its parts.
    """

    def __init__(self, context: forkserver.Starter, config: RunConfig) -> None:
        """Prepare both predictions, from the cache if possible; starts no process.

        Args:
            context: Starts the tracing processes: the warm fork server or, in a rank that another
                launcher started, a new interpreter.
            config: Validated configuration with ``launch.nproc`` resolved.
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
        hardware, no_hardware = hardware_of_run(config)
        self.step: BackgroundCall[StepPrediction] = BackgroundCall(
            context,
            "axonlaunch.planning.estimate:predict_step_beside",
            dataclasses.replace(config, hardware=hardware),
        )
        if (cached := estimate_cache.read_estimate(on_its_devices)) is not None:
            self.memory.settle(cached)
        if not _is_wanted(config):
            reason = "estimate.background=true predicts it during training"
            self.memory.settle(self.memory.result, reason)
            self.step.settle(None, reason)
        if hardware is None:
            self.step.settle(None, no_hardware)

    def close(self) -> None:
        """Abandon unfinished calls and end their processes."""
        self.memory.close()
        self.step.close()

    def begin(self) -> None:
        """Start the predictions, one after the other. Called at every logged step."""
        self.memory.begin()
        self.memory.wait(0)
        if self.memory.is_over:
            self.step.begin()
            self.step.wait(0)

    def wait(self, seconds: float = PATIENCE_S) -> None:
        """Wait for both predictions. Ctrl-C abandons them."""
        until = time.monotonic() + seconds
        self.memory.wait(seconds)
        if seconds:
            self.step.begin()
        self.step.wait(max(0.0, until - time.monotonic()))

    def files(self) -> dict[str, dict[str, Any]]:
        """Return the finished predictions by the name of the file that stores them."""
        contents: dict[str, dict[str, Any]] = {}
        if self.memory.result is not None:
            contents[ESTIMATE] = dataclasses.asdict(self.memory.result)
        if self.step.result is not None:
            contents[STEP_TIME] = dataclasses.asdict(self.step.result)
        elif self.step.is_over:
            contents[STEP_TIME] = {"reason": self.step.reason}
        return contents
