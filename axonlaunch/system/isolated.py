"""Calls functions in a forked copy of this process, with a deadline and a memory limit.

It is for untrusted code and patterns that may loop forever or use all memory in native code. The
copy is then killed, and this process reports an error. Changes that a call makes in the copy are
visible to later calls. The copy ends with this process.
"""

from __future__ import annotations

import ctypes
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

from axonlaunch.system.host import available_bytes

Result = TypeVar("Result")
_LEAST_MEMORY = 1 << 30
_LENGTH = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1
_TURN_S = 0.5
_LATE_S = 5
"""Seconds after the deadline at which the copy ends by itself if it was not killed."""


class IsolatedCallError(ValueError):
    """A call took too long, needed too much memory, or ended its process."""


class Isolated:
    """Calls functions on an object in a copy of this process.

    The copy is created at the first call by a thread that exists as long as the copy. The kernel
    kills the copy when that thread ends.
    """

    def __init__(self, target: Any, *, is_bounded: bool = True) -> None:
        """Prepare calls; no copy is created yet.

        Args:
            target: First argument of each function, in its state when the copy is created.
            is_bounded: Whether to limit the copy to half of the available memory.
        """
        self._target, self._is_bounded = target, is_bounded
        self._lock = threading.Lock()
        self._copy: _Copy | None = None

    def call(self, function: Callable[..., Result], *args: Any, seconds: float) -> Result:
        """Return ``function(target, *args)``.

        Args:
            function: Function of a module; its arguments and its result must be picklable.
            args: Further arguments of the function.
            seconds: Time limit after which the copy is killed.

        Raises:
            Exception: The exception of the function.
            IsolatedCallError: The function did not return in time, or the process ended.
        """
        with self._lock:
            copy = self._copy
            if copy is None or not copy.is_alive:
                copy = self._copy = _Copy(self._target, is_bounded=self._is_bounded)
            done = copy.submit((function, args, seconds))
            try:
                raised, result = done.result()
            except BaseException:  # including Ctrl-C
                copy.kill()
                raise
        if raised is not None:
            raise raised
        answer: Result = result
        return answer

    def end(self) -> None:
        """Kill the copy and any running call. A later call creates a new copy."""
        if self._copy is not None:
            self._copy.kill()

    def __del__(self) -> None:
        with suppress(Exception):
            self.end()


_Answer = tuple[BaseException | None, Any]
_Request = tuple[Callable[..., Any], tuple[Any, ...], float]


class _Copy:
    """A forked copy and the thread that communicates with it."""

    def __init__(self, target: Any, *, is_bounded: bool) -> None:
        self._target = target
        self._requests: SimpleQueue[tuple[_Request, Future[_Answer]] | None] = SimpleQueue()
        self._pid: int | None = None
        self._is_killed = False
        self._memory = max(_LEAST_MEMORY, available_bytes() // 2) if is_bounded else None
        self._thread = threading.Thread(target=self._serve, name="isolated calls", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_killed

    def submit(self, request: _Request) -> Future[_Answer]:
        done: Future[_Answer] = Future()
        self._requests.put((request, done))
        return done

    def kill(self) -> None:
        self._is_killed = True
        self._requests.put(None)
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _serve(self) -> None:
        """Create the copy and send it requests, one after another, until it is killed or fails."""
        requests, answers = os.pipe(), os.pipe()
        try:
            pid = self._pid = self._fork(requests, answers)
        finally:
            os.close(requests[0])
            os.close(answers[1])
        try:
            while not self._is_killed and (item := self._requests.get()) is not None:
                request, done = item
                try:
                    done.set_result(self._ask(request, requests[1], answers[0]))
                except BaseException as error:
                    self._is_killed = True
                    done.set_exception(error)
        finally:
            if self._pid is not None:
                self._pid = None
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            os.close(requests[1])
            os.close(answers[0])

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
        answer: _Answer = pickle.loads(content)  # written by the copy to a private pipe
        return answer

    def _why_ended(self) -> str:
        """Return the reason why the copy ended by itself."""
        assert self._pid is not None
        with suppress(ChildProcessError):
            status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            self._pid = None
            if status == -signal.SIGABRT and self._memory is not None:
                return f"ended its process; it may need more than {self._memory >> 20:,} MiB"
            if status < 0:
                return f"ended its process: {signal.Signals(-status).name}"
            return f"ended its process with status {status}"
        return "ended its process"

    def _fork(self, requests: tuple[int, int], answers: tuple[int, int]) -> int:
        end_with_parent = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python 3.12 warns that locks of other threads stay locked in the copy.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            return pid
        try:
            if end_with_parent is not None:
                end_with_parent(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                os.close(requests[1])
                os.close(answers[0])
                _answer_requests(self._target, requests[0], answers[1], memory=self._memory)
        finally:  # the copy must never continue with the code of its parent
            os._exit(1)


def _answer_requests(target: Any, requests: int, answers: int, *, memory: int | None) -> None:
    """Answer requests in the copy until the pipe is closed."""
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
        # If the parent process was killed, the kernel ends the copy with this timer.
        signal.setitimer(signal.ITIMER_REAL, seconds + _LATE_S)
        answer = _outcome(function, target, args)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(answers, answer)


def _outcome(function: Callable[..., Any], target: Any, args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((None, function(target, *args)))
    except MemoryError:
        return pickle.dumps((IsolatedCallError("needs more memory than there is"), None))
    except BaseException as error:  # a panic in Rust code is not an Exception
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
        EOFError: The other end was closed.
        TimeoutError: The deadline has passed.
    """
    length = _LENGTH.unpack(_read(descriptor, _LENGTH.size, until=until))[0]
    return bytes(_read(descriptor, length, until=until))


def _read(descriptor: int, length: int, *, until: float | None) -> bytearray:
    content = bytearray()
    poller = poll()  # unlike select, it accepts descriptors above 1023
    poller.register(descriptor, POLLIN)
    while len(content) < length:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if not poller.poll(1000 * min(left, _TURN_S)):
                continue
        if not (part := os.read(descriptor, min(1 << 20, length - len(content)))):
            raise EOFError
        content += part
    return content
