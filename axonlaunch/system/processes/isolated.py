"""Calls functions in a forked copy of this process, with a deadline and a bound on its memory.

It is for code and patterns of strangers that may loop, or take all memory, without returning to
Python: the copy is killed then, and this process reports an error. What a call changes in the copy
stays there for later calls. The copy ends with this process.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from select import POLLIN, poll
from typing import Any, TypeVar

from axonlaunch.system.node.host import free_memory_bytes
from axonlaunch.system.processes.death_signals import signal_name
from axonlaunch.system.processes.parent_death import end_with_parent

_Result = TypeVar("_Result")
_LEAST_MEMORY = 1 << 30
_LENGTH = struct.Struct("<Q")
_TURN_S = 0.5
_LATE_S = 5
"""Seconds after the deadline at which the copy ends by itself, if it still runs."""


class IsolatedCallError(ValueError):
    """A call took too long, needed too much memory, or ended its process."""


class Isolated:
    """An object whose functions are called in a copy of this process.

    The copy is made at the first call, by a thread that lives as long as it: the kernel ends the
    copy when that thread ends.
    """

    def __init__(self, target: Any, *, is_bounded: bool = True) -> None:
        """Store the target.

        Args:
            target: First argument of each function, in its state at the first call.
            is_bounded: Whether the copy may take at most half of the memory that is available.
        """
        self._target, self._is_bounded = target, is_bounded
        self._lock = threading.Lock()
        self._copy: _Copy | None = None

    def call(self, function: Callable[..., _Result], *args: Any, seconds: float) -> _Result:
        """Return ``function(target, *args)``.

        Args:
            function: One of a module; it and its arguments and result can be pickled.
            args: Further arguments of the function.
            seconds: Until the copy is killed.

        Raises:
            Exception: Any exception that the function raised.
            IsolatedCallError: The function did not return in time, or the process ended.
        """
        with self._lock:
            copy = self._copy
            if copy is None or not copy.is_alive:
                copy = self._copy = _Copy(self._target, is_bounded=self._is_bounded)
            try:
                raised, result = copy.ask((function, args, seconds))
            except BaseException:  # it may be Ctrl-C
                copy.kill()
                raise
        if raised is not None:
            raise raised
        answer: _Result = result
        return answer

    def end(self) -> None:
        """Kill the copy, which ends its current call; a later call makes a new copy."""
        if self._copy is not None:
            self._copy.kill()

    def __del__(self) -> None:
        with suppress(Exception):
            self.end()


_Answer = tuple[BaseException | None, Any]
_Request = tuple[Callable[..., Any], tuple[Any, ...], float]


class _Copy:
    """A forked copy, and the thread that speaks to it."""

    def __init__(self, target: Any, *, is_bounded: bool) -> None:
        self._target = target
        self._requests: SimpleQueue[tuple[_Request, Future[_Answer]] | None] = SimpleQueue()
        self._pid: int | None = None
        self._reaping = threading.Lock()
        """Held while the process is signaled or reaped: its number may be another's afterwards."""
        self._is_killed = False
        self._failure = ""
        self._memory = max(_LEAST_MEMORY, free_memory_bytes() // 2) if is_bounded else None
        self._thread = threading.Thread(target=self._serve, name="isolated calls", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_killed

    def ask(self, request: _Request) -> _Answer:
        """Return the answer to a request.

        Raises:
            IsolatedCallError: No answer in time, or the copy has ended or can't be created.
        """
        done: Future[_Answer] = Future()
        self._requests.put((request, done))
        while True:
            with suppress(TimeoutError):
                return done.result(timeout=_TURN_S)
            if not self._thread.is_alive() and not done.done():
                raise IsolatedCallError(self._failure or "ended its process")

    def kill(self) -> None:
        self._is_killed = True
        self._requests.put(None)
        with self._reaping:
            if self._pid is not None:
                os.kill(self._pid, signal.SIGKILL)

    def _serve(self) -> None:
        """Make the copy and hand it requests, one after another, until it is killed or fails."""
        there, ours = os.pipe(), os.pipe()
        try:
            pid = self._pid = self._fork(there, ours)
        except OSError as error:
            self._failure = f"can't run, as no process could be made: {error.strerror}"
            os.close(there[1])
            os.close(ours[0])
            return
        finally:
            os.close(there[0])
            os.close(ours[1])
            self._target = None  # the copy ends with the target, which this thread must not keep
        try:
            while not self._is_killed and (item := self._requests.get()) is not None:
                request, done = item
                try:
                    done.set_result(self._ask(request, there[1], ours[0]))
                except BaseException as error:
                    self._is_killed = True
                    done.set_exception(error)
        finally:
            with self._reaping:
                if self._pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    self._pid = None
            os.close(there[1])
            os.close(ours[0])

    def _ask(self, request: _Request, requests: int, answers: int) -> _Answer:
        seconds = request[2]
        deadline = time.monotonic() + seconds
        try:
            _send(requests, pickle.dumps(request))
            content = _receive(answers, until=deadline)
        except TimeoutError:
            message = f"took more than {seconds:.0f} s and was ended"
            raise IsolatedCallError(message) from None
        except (BrokenPipeError, EOFError):
            raise IsolatedCallError(self._why_ended()) from None
        answer: _Answer = pickle.loads(content)  # of our own copy, over a pipe that is ours
        return answer

    def _why_ended(self) -> str:
        """Say how the copy ended by itself."""
        pid = self._pid
        assert pid is not None
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._pid = None
        if status == -signal.SIGABRT and self._memory is not None:
            return f"ended its process; it may need more than {self._memory >> 20:,} MiB"
        if status < 0:
            return f"ended its process: {signal_name(-status)}"
        return f"ended its process with status {status}"

    def _fork(self, there: tuple[int, int], ours: tuple[int, int]) -> int:
        request_death = end_with_parent()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # From Python 3.12: locks that other threads hold stay locked in the copy.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            return pid
        try:
            request_death()
            if os.getppid() == parent:
                os.close(there[1])
                os.close(ours[0])
                _answer_requests(self._target, there[0], ours[1], memory=self._memory)
        finally:  # whatever happens, the copy must not continue as its parent
            os._exit(1)


def _answer_requests(target: Any, requests: int, answers: int, *, memory: int | None) -> None:
    """Answer requests in the copy, until there are no more."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries in Rust print their panics
    if memory is not None:
        limit = _virtual_bytes() + memory
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    while True:
        try:
            content = _receive(requests, until=None)
        except EOFError:
            os._exit(0)
        function, args, seconds = pickle.loads(content)
        # The kernel ends the copy where the process that would do it was killed.
        signal.setitimer(signal.ITIMER_REAL, seconds + _LATE_S)
        answer = _outcome(function, target, args)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(answers, answer)


def _outcome(function: Callable[..., Any], target: Any, args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((None, function(target, *args)))
    except MemoryError:
        return pickle.dumps((IsolatedCallError("needs more memory than there is"), None))
    except BaseException as error:  # a panic of Rust is no Exception
        text = " ".join(str(error).split())[:300]
        try:
            if not isinstance(error, Exception):
                raise TypeError
            content = pickle.dumps((error, None))
            pickle.loads(content)
        except Exception:
            failed = IsolatedCallError(f"failed: {type(error).__name__}: {text}")
            return pickle.dumps((failed, None))
        return content


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[0]) * resource.getpagesize()


def _send(descriptor: int, content: bytes) -> None:
    for part in (_LENGTH.pack(len(content)), content):
        view = memoryview(part)
        while view:
            view = view[os.write(descriptor, view) :]


def _receive(descriptor: int, *, until: float | None) -> bytes:
    """Read a message.

    Raises:
        EOFError: The other end is closed.
        TimeoutError: No message arrived in time.
    """
    length = _LENGTH.unpack(_read(descriptor, _LENGTH.size, until=until))[0]
    return bytes(_read(descriptor, length, until=until))


def _read(descriptor: int, length: int, *, until: float | None) -> bytearray:
    content = bytearray()
    waiting = poll()  # unlike select it takes any descriptor
    waiting.register(descriptor, POLLIN)
    while len(content) < length:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if not waiting.poll(1000 * min(left, _TURN_S)):
                continue
        if not (part := os.read(descriptor, min(1 << 20, length - len(content)))):
            raise EOFError
        content += part
    return content
