"""Updates streamed through a simulated GPU: copies, pinned memory and synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from axonlaunch.engines.optimizer import streaming

META, HOST = torch.device("meta"), torch.device("cpu")


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_streamed_states_reuse_host_memory(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are on the host; the update runs on the meta device, which holds no values."""
    waiting: list[bool] = []
    arithmetic = streaming.UpdateArithmetic(dtype=dtype)
    copy: Any = torch.Tensor.copy_

    def copied(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> Any:
        if other.is_meta and not self.is_meta:
            waiting.append(not non_blocking)
            return self
        return copy(self, other, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    weight = nn.Parameter(torch.ones(3, device=META))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight] = {"momentum_buffer": torch.ones(3)}
    streaming.stream_parameters(optimizer, device=META, states_on=HOST, arithmetic=arithmetic)
    [before] = optimizer.state[weight].values()
    for _ in range(2):
        weight.grad = torch.ones(3, device=META)
        optimizer.step()
    [after] = optimizer.state[weight].values()
    assert after is before
    assert waiting == [False, False]


def test_offloaded_parameter_is_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    copy: Any = torch.Tensor.copy_

    def copied(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> Any:
        if other.is_meta and not self.is_meta:
            written.append(self.data_ptr())
            return self
        return copy(self, other, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    streaming.stream_parameters(optimizer, device=META)
    optimizer.step()
    assert written == [weight.data_ptr()]


# Copies in both directions overlap the update, on simulated streams.


class _Stream:
    """A simulated GPU stream that only tracks the order of its operations.

    Its vector clock counts, per stream, the operations that are complete before this
    one continues.
    """

    current: _Stream

    def __init__(self, device: object = None) -> None:
        self.clock = {self: 0}

    def do(self) -> tuple[_Stream, dict[_Stream, int]]:
        self.clock[self] += 1
        return self, dict(self.clock)

    def wait_stream(self, other: _Stream) -> None:
        for stream, count in other.clock.items():
            self.clock[stream] = max(count, self.clock.get(stream, 0))

    def record_event(self) -> SimpleNamespace:
        clock = dict(self.clock)
        return SimpleNamespace(synchronize=lambda: _wait_on_host(clock))

    def synchronize(self) -> None:
        _wait_on_host(self.clock)


_on_host: dict[_Stream, int] = {}


def _wait_on_host(clock: dict[_Stream, int]) -> None:
    for stream, count in clock.items():
        _on_host[stream] = max(count, _on_host.get(stream, 0))


@contextmanager
def _on(stream: _Stream) -> Iterator[None]:
    before, _Stream.current = _Stream.current, stream
    yield
    _Stream.current = before


Done = tuple[_Stream, dict[_Stream, int]]


def _is_before(first: Done, second: Done) -> bool:
    return second[1].get(first[0], 0) >= first[1][first[0]]


def _is_over(done: Done) -> bool:
    return _on_host.get(done[0], 0) >= done[1][done[0]]


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Done]]:
    """Four parameters that were updated on a GPU: the operations on each, in order."""
    done: dict[str, list[Done]] = {"brought": [], "updated": [], "taken back": []}
    over: list[list[bool]] = []
    _Stream.current = _Stream()
    _on_host.clear()
    gradients = _Stream.current.do()
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", _on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream.current)
    monkeypatch.setattr(streaming, "_copied", lambda tensor, device: tensor.clone())

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name == "brought":
                over.append([_is_over(taken) for taken in done["taken back"]])
            done[name].append(_Stream.current.do())
            return function(*args)

        return call

    monkeypatch.setattr(streaming, "_brought", noted("brought", streaming._brought))
    monkeypatch.setattr(streaming, "_taken_back", noted("taken back", streaming._taken_back))
    weights = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    monkeypatch.setattr(optimizer, "step", noted("updated", optimizer.step))
    streaming.stream_parameters(optimizer, device=torch.device("cuda", 0), states_on=HOST)
    for weight in weights:
        weight.grad = torch.ones(3)
    optimizer.step()
    assert all(_is_before(gradients, brought) for brought in done["brought"])
    # The host starts the fourth when two of three are complete, and waits for all at the end.
    assert over == [[], [False], [True, False], [True, True, False]]
    assert all(map(_is_over, done["taken back"]))
    return done


def test_streaming_copies_updates_and_copies_back_in_order(
    streamed: dict[str, list[Done]],
) -> None:
    for brought, updated, taken in zip(*streamed.values(), strict=True):
        assert _is_before(brought, updated)
        assert _is_before(updated, taken)


def test_streaming_overlaps_copies_with_updates(
    streamed: dict[str, list[Done]],
) -> None:
    third = streamed["brought"][2]
    second = streamed["updated"][1]
    first = streamed["taken back"][0]
    for later, other in ((third, second), (second, first)):
        assert not _is_before(later, other)
        assert not _is_before(other, later)
    second_left = streamed["taken back"][1]
    assert not _is_before(second_left, third)
    assert not _is_before(third, second_left)
