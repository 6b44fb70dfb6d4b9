"""Measures how a rank's GPU spends a step, with CUDA events around the blocks of the model.

One step per report is measured. Its events are read when a later step is logged, so no step waits
for the device. Time between blocks, in which a stream waits for gathers and sums of other ranks,
counts as waiting. Communication of tensor and context ranks inside a block counts as computing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_Span = tuple[Any, Any]


class BlockTimes:
    """Measures the seconds of a step that this rank spent waiting for data and computing blocks."""

    enough_s = 1e-6
    """Minimum of measured seconds for a report; any measured step is enough."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        """Register hooks on blocks. Call it after hooks that gather parameters are registered.

        Args:
            blocks: This rank's blocks of the model.
        """
        self._hooks: list[Any] = []
        for block in blocks:
            call: dict[str, Any] = {}
            self._hooks += [
                block.register_forward_pre_hook(partial(self._enter, call)),
                block.register_forward_hook(partial(self._leave, call)),
            ]
        self._has_stepped = False
        self._phase, self._since = "", time.perf_counter()
        self.clear()

    def clear(self) -> None:
        """Discard the measurement and measure the next step."""
        self._begun: Any = None
        self._ended: Any = None
        self._spans: list[_Span] = []
        self._read_s = 0.0
        self._measures = False

    def note(self, phase: str) -> None:
        """Record the phase that the trainer begins. A step includes reading the next batch."""
        now = time.perf_counter()
        if self._measures and self._phase == "reading":
            self._read_s += now - self._since
        if self._measures and phase != "reading":
            self._ended, self._measures = _mark(), False
        elif phase == "stepping" and self._begun is None and self._has_stepped:
            self._begun, self._measures = _mark(), True
        self._has_stepped |= phase == "stepping"  # skips the first step, which compiles kernels
        self._phase, self._since = phase, now

    def seconds_by_kind(self) -> list[float]:
        """Return four numbers of seconds: waiting for data, computing, waiting for ranks, and 0.

        The last one is the time in which a rank is ready but has no core; it is not measured on a
        GPU. All values are 0 until the device has finished the step.
        """
        if self._ended is None or not self._ended.query():
            return [0.0] * 4
        total = _seconds(self._begun, self._ended)
        computed = min(total, sum(_seconds(*span) for span in self._spans))
        read = min(self._read_s, total - computed)  # the device may have computed meanwhile
        return [read, computed, total - computed - read, 0.0]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, call: dict[str, Any], block: nn.Module, inputs: tuple[Any, ...]) -> None:
        del block
        if self._measures:
            call["inputs"], call["begun"] = _differentiable(inputs), _mark()

    def _leave(
        self, call: dict[str, Any], block: nn.Module, inputs: tuple[Any, ...], output: Any
    ) -> None:
        del block, inputs
        if not self._measures or "begun" not in call:
            return
        self._spans.append((call.pop("begun"), _mark()))
        input_, result = call.pop("inputs"), _differentiable(output)
        if input_ is None or result is None:
            return
        backward: list[Any] = []
        result.register_hook(lambda gradient: backward.append(_mark()))
        input_.register_hook(lambda gradient: self._end_backward(backward))

    def _end_backward(self, backward: list[Any]) -> None:
        if backward:
            self._spans.append((backward.pop(), _mark()))


def _mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begun: Any, ended: Any) -> float:
    return float(begun.elapsed_time(ended)) / 1e3


def _differentiable(tensors: Any) -> Tensor | None:
    """Return the first tensor that requires a gradient."""
    listed = tensors if isinstance(tensors, tuple) else (tensors,)
    return next((t for t in listed if isinstance(t, Tensor) and t.requires_grad), None)
