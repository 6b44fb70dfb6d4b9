"""Garbage is collected when the run decides, on every rank in the same step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from axonlaunch.training.process.garbage import GarbageCollection


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


class Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.own = self


def test_garbage_is_collected_every_nth_step() -> None:
    with GarbageCollection(3) as collection:
        assert not gc.isenabled()
        left = weakref.ref(Cycle())
        collection.step_done(1)
        collection.step_done(2)
        assert left() is not None
        collection.step_done(3)
        assert left() is None
    assert gc.isenabled()


def test_garbage_collection_is_automatic_with_zero() -> None:
    with GarbageCollection(0) as collection:
        assert gc.isenabled()
        left = weakref.ref(Cycle())
        collection.step_done(1)
        assert left() is not None


def test_failed_loop_enables_garbage_collector() -> None:
    with pytest.raises(ValueError, match="x"), GarbageCollection(3):
        raise ValueError("x")
    assert gc.isenabled()


def test_garbage_collector_is_enabled_after_last_thread() -> None:
    first, second = GarbageCollection(3), GarbageCollection(3)
    with first, second:
        pass
    assert gc.isenabled()
