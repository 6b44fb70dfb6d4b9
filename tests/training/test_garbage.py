"""Garbage is collected when the run decides, on every rank in the same step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from axonlaunch.training.garbage import GarbageCollection


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


class Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.own = self


def test_cycles_are_freed_in_every_nth_step_and_not_between() -> None:
    with GarbageCollection(3) as collection:
        assert not gc.isenabled()
        left = weakref.ref(Cycle())
        collection.step_done(1)
        collection.step_done(2)
        assert left() is not None
        collection.step_done(3)
        assert left() is None
    assert gc.isenabled()


def test_with_zero_python_decides() -> None:
    with GarbageCollection(0) as collection:
        assert gc.isenabled()
        left = weakref.ref(Cycle())
        collection.step_done(1)
        assert left() is not None


def test_a_loop_that_fails_gives_the_collector_back() -> None:
    with pytest.raises(ValueError, match="x"), GarbageCollection(3):
        raise ValueError("x")
    assert gc.isenabled()


def test_of_threads_that_share_a_collector_it_is_enabled_at_the_end() -> None:
    first, second = GarbageCollection(3), GarbageCollection(3)
    with first, second:
        pass
    assert gc.isenabled()
