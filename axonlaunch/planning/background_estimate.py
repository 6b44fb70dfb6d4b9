"""Predicts the memory and step time of a run in the background, at the lowest priority.

The prediction begins at the first logged step, so that it does not delay the first steps. At the
end of the run, unfinished predictions are waited for, so that the summary can compare the measured
peak with the estimated one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.planning import estimate_cache
from axonlaunch.planning.records import Estimate, StepPrediction
from axonlaunch.planning.throughput.run_hardware import hardware_of_run
from axonlaunch.planning.tracing.shape_only_data import replace_with_synthetic
from axonlaunch.system.processes import forked_call, forkserver
from axonlaunch.system.processes.forked_process import reason_of
from axonlaunch.system.storage.run_files import ESTIMATE, STEP_TIME

PATIENCE_S = 60.0
"""Maximum time in seconds to wait for predictions after the end of the run."""
_Result = TypeVar("_Result")


class BackgroundCall(Generic[_Result]):
    """A function of a configuration that is called in a background process.

    Attributes:
        result: Result of the function; None until it has returned.
        reason: Reason why there is no result.
        traceback: Traceback of an unexpected error of the function; empty otherwise.
        is_over: Whether the call has finished or failed.
    """

    def __init__(
        self,
        context: forkserver.Starter,
        target: str,
        config: RunConfig,
        *,
        keep: Callable[[_Result], None] = lambda result: None,
    ) -> None:
        """Prepare a call without starting it.

        Args:
            context: Starter of the process.
            target: Name of the function, as ``package.module:function``.
            config: Argument of the function.
            keep: Callback for the result.
        """
        self._context = context
        self._target = target
        self._config = config
        self._keep = keep
        self._call: forked_call.ForkedCall | None = None
        self.result: _Result | None = None
        self.reason, self.traceback = "no step was done", ""
        self.is_over = False

    def set_result(self, result: _Result | None, reason: str = "") -> None:
        """Set the result, or the reason for a missing result, and finish the call."""
        self.result, self.reason, self.is_over = result, reason, True

    def begin(self) -> None:
        """Start the call, unless it was started or has finished."""
        if self.is_over or self._call is not None:
            return
        self.reason = "it was not ready when the run had ended"
        try:
            self._call = forked_call.ForkedCall(
                self._context, self._target, (self._config,), task="estimating this run"
            )
        except (forkserver.ForkServerError, OSError) as error:
            self.set_result(None, str(error))  # the run continues without the result

    def wait(self, seconds: float) -> None:
        """Wait until the call has finished or failed; Ctrl-C ends the wait."""
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
            self.set_result(self._call.result)
        elif isinstance(error, ConfigError):
            self.set_result(None, str(error))
        else:
            self.set_result(None, reason_of(error))
            self.traceback = str(error.__cause__ or "")

    def close(self) -> None:
        """End unfinished calls and their processes."""
        call, self._call = self._call, None
        if call is not None:
            call.end()


def _is_wanted(config: RunConfig) -> bool:
    """Return ``estimate.background``; by default only GPU runs have CPU cores to spare."""
    wanted = config.estimate.background
    return config.launch.backend == "nccl" if wanted is None else wanted


class BackgroundEstimate:
    """Predictions for a run.

    Attributes:
        memory: Estimated peak memory of the highest rank, with its parts.
        step: Predicted time of a step, with its parts.
        is_wanted: Whether the run asks for predictions, or has them by default.
    """

    def __init__(self, context: forkserver.Starter, config: RunConfig) -> None:
        """Read cached predictions of a run without starting a process.

        Args:
            context: Starter of the tracing processes: the warm fork server, or a new interpreter
                in a rank started by another launcher.
            config: Checked configuration with ``launch.nproc`` resolved.
        """
        synthetic = for_estimate = replace_with_synthetic(config)
        if config.launch.backend != "nccl":  # without a GPU there is no caching allocator
            for_estimate = dataclasses.replace(synthetic, hardware=HardwareConfig(name="cpu"))
        self.memory: BackgroundCall[Estimate] = BackgroundCall(
            context,
            "axonlaunch.planning.estimate:trace_in_background",
            for_estimate,
            keep=lambda estimate: estimate_cache.write_estimate(for_estimate, estimate),
        )
        hardware, no_hardware = hardware_of_run(config)
        self.step: BackgroundCall[StepPrediction] = BackgroundCall(
            context,
            "axonlaunch.planning.estimate:predict_step_in_background",
            dataclasses.replace(config, hardware=hardware),
        )
        if (cached := estimate_cache.read_estimate(for_estimate)) is not None:
            self.memory.set_result(cached)
        self.is_wanted = _is_wanted(config)
        if not self.is_wanted:
            reason = "estimate.background=true predicts it during training"
            self.memory.set_result(self.memory.result, reason)
            self.step.set_result(None, reason)
        if hardware is None:
            self.step.set_result(None, no_hardware)

    def close(self) -> None:
        """End unfinished calls and their processes."""
        self.memory.close()
        self.step.close()

    def begin(self) -> None:
        """Start the next prediction that was not started; call this at every logged step."""
        self.memory.begin()
        self.memory.wait(0)
        if self.memory.is_over:
            self.step.begin()
            self.step.wait(0)

    def wait(self, seconds: float = PATIENCE_S) -> None:
        """Wait until all predictions have finished or failed; Ctrl-C ends the wait."""
        deadline = time.monotonic() + seconds
        self.memory.wait(seconds)
        if seconds:
            self.step.begin()
        self.step.wait(max(0.0, deadline - time.monotonic()))

    def files(self) -> dict[str, dict[str, Any]]:
        """Return the finished predictions by the name of their file."""
        contents: dict[str, dict[str, Any]] = {}
        if self.memory.result is not None:
            contents[ESTIMATE] = dataclasses.asdict(self.memory.result)
        if self.step.result is not None:
            contents[STEP_TIME] = dataclasses.asdict(self.step.result)
        elif self.step.is_over:
            contents[STEP_TIME] = {"reason": self.step.reason}
        return contents
