"""What a CPU's tensors really hold in a run's second step, beside which an estimate is held.

It watches two steps and then no more, for it costs something with every operation. It counts as
the estimate does, and refuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from axonlaunch.config import RunConfig
from axonlaunch.engines.base import Engine
from axonlaunch.planning.tracing import extrapolate_depth, gloo_buffers
from axonlaunch.planning.tracing.engine_categories import follow, host_categories
from axonlaunch.planning.tracing.storage_trace import StorageTrace, on_device

WATCHED = 2


class CpuPeakMemory:
    """The most that tensors hold on this rank in the second step that it does.

    The first makes the optimizer's states; a run of one step is measured by that one.
    """

    def __init__(self, config: RunConfig) -> None:
        """Begin to watch, before the engine is built.

        Args:
            config: The run's; what it offloads is not on the device.
        """
        on_gloo = config.launch.backend == "gloo"
        self._trace: StorageTrace | None = StorageTrace(
            on_host=host_categories(config),
            workspaces=gloo_buffers.unseen if on_gloo else lambda func, arguments: (),
        )
        self._steps = 0
        self._peak: int | None = None

    def storing(self) -> AbstractContextManager[Any]:
        """Return the context in which an engine's storage is allocated."""
        assert self._trace is not None
        return self._trace

    def peak_bytes(self) -> int | None:
        """Return what was seen; None before a step."""
        return self._peak

    @contextmanager
    def step(self, engine: Engine) -> Iterator[None]:
        """Surround a step of the run."""
        trace = self._trace
        if trace is None:
            yield
            return
        with trace:
            follow(engine, trace)
            trace.forget()
            yield
        trace.finish()
        self._steps += 1
        self._peak = on_device(extrapolate_depth.peak(trace.events)[0])
        if self._steps == WATCHED:
            self._trace = None
