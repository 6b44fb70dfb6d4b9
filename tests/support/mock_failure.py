"""Catches failures of runs on the mock world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from axonlaunch.comm import RankFailedError, World


def failure_of(
    fn: Callable[[World], Any], *, size: int = 3, timeout_s: float = 20
) -> RankFailedError:
    """Run a failing function on every rank; return the error that the caller gets."""
    with pytest.raises(RankFailedError) as caught:
        World.mock(size, timeout_s=timeout_s).run(fn)
    return caught.value
