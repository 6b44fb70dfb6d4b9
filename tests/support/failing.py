"""Functions that ``tests/launch/test_forkserver.py`` calls in another process; each fails
differently.
"""

from __future__ import annotations

import threading


class UnpicklableError(Exception):
    def __init__(self, what: str, *, lock: threading.Lock) -> None:
        super().__init__(what)
        self.lock = lock


def raises() -> None:
    try:
        _deep_inside()
    except KeyError as error:
        raise ValueError("what was wrong") from error


def raises_what_cannot_be_pickled() -> None:
    raise UnpicklableError("it holds a lock", lock=threading.Lock())


def exits() -> None:
    raise SystemExit(3)


class PanicError(BaseException):
    pass


def panics() -> None:
    raise PanicError("index out of bounds")


def _deep_inside() -> None:
    raise KeyError("first")
