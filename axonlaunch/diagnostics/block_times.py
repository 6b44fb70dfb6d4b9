"""What a rank's GPU does in a step, by events in its stream around the blocks of the model.

One step of each report is measured, and its events are read when a later step is logged: no step
waits for the device. What a stream waits for between blocks, gathers and sums of other ranks, is
between events; what tensor and context ranks exchange inside a block counts as the block's.
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
    """Seconds of a step in which this rank waited for data, and in which its blocks computed."""

    enough_s = 1e-6
    """Measured seconds from which shares are reported: one step's."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        """Hook into blocks, once nothing else is to: what gathers parameters comes before.

        Args:
            blocks: This rank's.
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
        """Measure the next step."""
        self._begun: Any = None
        self._ended: Any = None
        self._spans: list[_Span] = []
        self._read_s = 0.0
        self._measures = False

    def note(self, phase: str) -> None:
        """Take what the trainer begins to do; a step ends where the next begins, data read."""
        now = time.perf_counter()
        if self._measures and self._phase == "reading":
            self._read_s += now - self._since
        if self._measures and phase != "reading":
            self._ended, self._measures = _mark(), False
        elif phase == "stepping" and self._begun is None and self._has_stepped:
            self._begun, self._measures = _mark(), True
        self._has_stepped |= phase == "stepping"  # the first step compiles and tries kernels out
        self._phase, self._since = phase, now

    def seconds_by_kind(self) -> list[float]:
        """Return seconds of waiting for data, of computing and of the rest, and 0 of no core.

        All are 0 until the device has done the step.
        """
        if self._ended is None or not self._ended.query():
            return [0.0] * 4
        total = _seconds(self._begun, self._ended)
        computed = min(total, sum(_seconds(*span) for span in self._spans))
        read = min(self._read_s, total - computed)  # the device may have had work meanwhile
        return [read, computed, total - computed - read, 0.0]

    def close(self) -> None:
        """Leave the blocks as they were."""
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
        taken, given = call.pop("inputs"), _differentiable(output)
        if taken is None or given is None:
            return
        backward: list[Any] = []
        given.register_hook(lambda gradient: backward.append(_mark()))
        taken.register_hook(lambda gradient: self._end_backward(backward))

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
    """Return the first tensor that a gradient comes to."""
    listed = tensors if isinstance(tensors, tuple) else (tensors,)
    return next((t for t in listed if isinstance(t, Tensor) and t.requires_grad), None)
