"""Calls in a copy of this process end in time, within their memory, and with this process."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from axonlaunch.system.processes.isolated import Isolated, IsolatedCallError


def add(target: list[int], number: int) -> list[int]:
    target.append(number)
    return target


def pid_of(target: object) -> int:
    return os.getpid()


def loop_in_c(target: object) -> int:
    return len(str(10**10**9))


def loop(target: object) -> None:
    while True:
        pass


def take_memory(target: object) -> int:
    return len(bytes(1 << 42))


def fail(target: object) -> None:
    raise ValueError("as asked")


class Panic(BaseException):
    """As raised by a library in Rust."""


def panic(target: object) -> None:
    raise Panic("called `Option::unwrap()`")


def abort(target: object) -> None:
    os.abort()


def test_isolated_call_returns_result_without_side_effects() -> None:
    numbers = [1]
    isolated = Isolated(numbers)
    assert isolated.call(add, 2, seconds=20) == [1, 2]
    assert isolated.call(add, 3, seconds=20) == [1, 2, 3]
    assert numbers == [1]
    with pytest.raises(ValueError, match="as asked"):
        isolated.call(fail, seconds=20)
    isolated.end()


@pytest.mark.parametrize("function", [loop, loop_in_c])
def test_a_call_that_never_returns_is_ended_at_its_deadline(function: object) -> None:
    isolated, start = Isolated(None), time.monotonic()
    with pytest.raises(IsolatedCallError, match="took more than 1 s and was ended"):
        isolated.call(function, seconds=1)  # type: ignore[arg-type]
    assert time.monotonic() - start < 15
    assert isolated.call(pid_of, seconds=20) != os.getpid()
    isolated.end()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (take_memory, "needs more memory than there is"),
        (panic, "failed: Panic: called `Option::unwrap"),
        (abort, "ended its process; it may need more than"),
    ],
)
def test_dead_isolated_call_is_reported(function: object, message: str) -> None:
    isolated = Isolated(None)
    with pytest.raises(IsolatedCallError, match=message):
        isolated.call(function, seconds=20)  # type: ignore[arg-type]
    isolated.end()


def test_a_call_can_be_ended_by_another_thread() -> None:
    isolated = Isolated(None)
    threading.Timer(0.5, isolated.end).start()
    with pytest.raises(IsolatedCallError, match="ended its process"):
        isolated.call(loop, seconds=60)


PARENT = """
import sys
sys.path.insert(0, {folder!r})
from test_isolated import loop, pid_of
from axonlaunch.system.processes.isolated import Isolated
isolated = Isolated(None)
print(isolated.call(pid_of, seconds=20), flush=True)
isolated.call(loop, seconds=100)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_copy_ends_with_the_process_that_made_it(number: int) -> None:
    code = PARENT.format(folder=str(Path(__file__).parent))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        copy = int(parent.stdout.readline())
        time.sleep(0.5)
        parent.send_signal(number)
        parent.wait(20)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{copy}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_copy_ends_when_its_target_is_deleted() -> None:
    class Owner:
        def __init__(self) -> None:
            self.isolated = Isolated(self)

    owner = Owner()
    pid = owner.isolated.call(pid_of, seconds=20)
    del owner
    gc.collect()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_where_no_process_can_be_made_a_call_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(IsolatedCallError, match="no process could be made: Cannot allocate"):
        Isolated(None).call(pid_of, seconds=20)
