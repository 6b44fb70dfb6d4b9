"""Simulated GPU streams, by which tests check the order of copies and computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch


class Stream:
    """A simulated GPU stream that only tracks the order of its operations.

    Its vector clock counts, per stream, the operations that are complete before this one continues.
    """

    current: Stream

    def __init__(self, device: object = None) -> None:
        self.clock = {self: 0}

    def do(self) -> tuple[Stream, dict[Stream, int]]:
        self.clock[self] += 1
        return self, dict(self.clock)

    def wait_stream(self, other: Stream) -> None:
        for stream, count in other.clock.items():
            self.clock[stream] = max(count, self.clock.get(stream, 0))

    def record_event(self) -> SimpleNamespace:
        clock = dict(self.clock)
        return SimpleNamespace(synchronize=lambda: _wait_on_host(clock))

    def synchronize(self) -> None:
        _wait_on_host(self.clock)


Done = tuple[Stream, dict[Stream, int]]
_on_host: dict[Stream, int] = {}


def simulate_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch's streams, and begin with a new current one."""
    Stream.current = Stream()
    _on_host.clear()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", _on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)


def is_before(first: Done, second: Done) -> bool:
    return second[1].get(first[0], 0) >= first[1][first[0]]


def is_over(done: Done) -> bool:
    """Return whether the host has waited for an operation."""
    return _on_host.get(done[0], 0) >= done[1][done[0]]


def _wait_on_host(clock: dict[Stream, int]) -> None:
    for stream, count in clock.items():
        _on_host[stream] = max(count, _on_host.get(stream, 0))


@contextmanager
def _on(stream: Stream) -> Iterator[None]:
    previous, Stream.current = Stream.current, stream
    yield
    Stream.current = previous
