"""Measures the peak memory of a real run's tensors on a CPU, for comparison with the estimate.

Only the first two steps are watched, because watching slows down every operation. Bytes are counted
in the same way as in an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from axonlaunch.config import RunConfig
from axonlaunch.engines.engine import Engine
from axonlaunch.planning.tracing.devices import gloo_buffers
from axonlaunch.planning.tracing.engine_categories import categorize_engine, host_categories
from axonlaunch.planning.tracing.extrapolation import extrapolate_depth
from axonlaunch.planning.tracing.storage_trace import StorageTrace, on_device

WATCHED = 2


class CpuPeakMemory:
    """Peak memory of this rank's tensors in its second step.

    The first step creates the optimizer states. It is used only if the run has a single step.
    """

    def __init__(self, config: RunConfig) -> None:
        """Begin to watch. Create this before the engine is built.

        Args:
            config: Configuration of the run. Offloaded tensors do not count as device memory.
        """
        on_gloo = config.launch.backend == "gloo"
        self._trace: StorageTrace | None = StorageTrace(
            on_host=host_categories(config),
            workspaces=gloo_buffers.untraced_buffers if on_gloo else lambda func, arguments: (),
        )
        self._steps = 0
        self._peak: int | None = None

    def storing(self) -> AbstractContextManager[Any]:
        """Return a context in which the engine's storages are counted."""
        assert self._trace is not None
        return self._trace

    def peak_bytes(self) -> int | None:
        """Return the measured peak; None before the first step."""
        return self._peak

    @contextmanager
    def step(self, engine: Engine) -> Iterator[None]:
        """Watch one step of the run."""
        trace = self._trace
        if trace is None:
            yield
            return
        with trace:
            categorize_engine(engine, trace)
            trace.forget()
            yield
        trace.finish()
        self._steps += 1
        self._peak = on_device(extrapolate_depth.peak(trace.events)[0])
        if self._steps == WATCHED:
            self._trace = None
