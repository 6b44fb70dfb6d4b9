"""Calls of functions in forked processes: what they return, yield or raise, with its traceback.

A function is named, ``"module:function"``, so that the caller need not import it.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

from axonlaunch.system.forked_process import ProcessDiedError
from axonlaunch.system.forkserver import Starter, become_independent, fork
from axonlaunch.system.targets import load_target

_GRACE_S = 0.3
"""Seconds in which other calls report what the failure of one did to them."""
_DYING_S = 1.0
"""Seconds that killed processes get at most to be gone: one that nobody reaps never is."""


def call(context: Starter, target: str, *args: Any, task: str = "") -> Any:
    """Run ``"module:function"`` in a forked process and return what it returns.

    Args:
        context: What starts the process.
        target: The function.
        args: Its arguments.
        task: What the process does, as in "estimating memory", for the message when it dies.

    Raises:
        Exception: What the function raised; its ``__cause__`` shows the traceback that it had in
            the process.
        ProcessDiedError: The process died without an answer.
        RuntimeError: The function raised what can't be pickled.
    """
    try:
        [result] = call_together(context, target, [args], task=task)
    except CallsFailedError as failed:
        error = failed.errors[0]
    else:
        return result
    raise error  # out here, so that the caller sees the process's failure and none of ours


def stream(
    context: ForkServerContext, target: str, *args: Any, task: str = ""
) -> Generator[Any, None, Any]:
    """Run a generator ``"module:function"`` in a forked process; yield what it yields as it comes.

    Arguments are those of ``call``.

    Returns:
        What it returned.

    Raises:
        Exception: What the function raised.
        ProcessDiedError: The process died without an answer.
    """
    call = ForkedCall(context, target, args, task=task)
    try:
        while True:
            if (error := call.receive()) is not None:
                raise error
            if call.is_done:
                return call.result
            yield call.result
    finally:
        call.end()


class CallsFailedError(Exception):
    """Of calls that depend on each other some failed; the others were ended.

    Attributes:
        errors: What each that failed raised, by its index.
    """

    def __init__(self, errors: dict[int, Exception]) -> None:
        super().__init__("; ".join(f"call {index}: {error}" for index, error in errors.items()))
        self.errors = errors


def call_together(
    context: Starter, target: str, arguments: Sequence[tuple[Any, ...]], *, task: str = ""
) -> list[Any]:
    """Run ``"module:function"`` in a forked process for each arguments, all at once.

    Args:
        context: What starts the processes.
        target: The function.
        arguments: The arguments of each call.
        task: What the processes do, as in ``call``.

    Returns:
        What each returned.

    Raises:
        CallsFailedError: One raised, or died without an answer.
    """
    calls = [ForkedCall(context, target, args, task=task) for args in arguments]
    errors: dict[int, Exception] = {}
    try:
        pending = {call.connection: index for index, call in enumerate(calls)}
        while pending:
            # After one failed the others soon report what it did to them: which is the cause is for
            # the caller to find.
            ready = wait([*pending], timeout=_GRACE_S if errors else None)
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                index = pending.pop(connection)
                if (error := calls[index].receive()) is not None:
                    errors[index] = error
    finally:
        for call in calls:
            call.end()
    if errors:
        raise CallsFailedError(errors)
    return [call.result for call in calls]


class RemoteTracebackError(Exception):
    """The cause of an exception that was raised in another process: its traceback there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class ForkedCall:
    """A function that runs in another process.

    Attributes:
        result: What it returned, once ``receive`` took it; of a generator what it yielded last.
        is_done: Whether it returned.
    """

    def __init__(
        self, context: Starter, target: str, args: tuple[Any, ...], *, task: str = ""
    ) -> None:
        """Begin to run ``"module:function"``; arguments as ``call``'s."""
        self.result: Any = None
        self.is_done = False
        self._task = task or f"running {target}"
        self.connection, theirs = context.Pipe(duplex=False)
        self._process = fork(context, "axonlaunch.system.forked_call:answer", theirs, target, args)
        theirs.close()

    def is_ready(self, *, within_s: float = 0.0) -> bool:
        """Return whether ``receive`` would not wait; wait for that some seconds."""
        return self.connection.poll(within_s)

    def receive(self) -> Exception | None:
        """Take what the function returned, yielded or raised; return the last of these."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError):  # OSError: in the middle of a message
            self._process.join()
            return ProcessDiedError(self._task, self._process.exitcode)
        if kind == "yielded":
            self.result = content
            return None
        self._process.join()
        self.is_done = True
        if kind == "raised":
            error, text = content
            assert isinstance(error, Exception)
            # Tracebacks don't pickle: as concurrent.futures does, theirs is shown as the cause.
            error.__cause__ = RemoteTracebackError(text)
            return error
        self.result = content
        return None

    def end(self) -> None:
        """Leave no process behind, nor any of its group's."""
        if not self._process.has_ended:
            self._process.kill_group()
            self._process.join()
            _wait_for_group(self._process.pid)
        self._process.join()
        self.connection.close()


def _wait_for_group(leader: int) -> None:
    """Wait until those that were killed with their leader are gone, which takes them a moment."""
    deadline = time.monotonic() + _DYING_S
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(leader, 0)
            time.sleep(0.005)


def answer(connection: Connection, target: str, args: tuple[Any, ...]) -> None:
    """Call a function and send what it returned, yielded or raised; never returns."""
    become_independent()
    os.dup2(2, 1)  # standard output is the command's own
    try:
        result = load_target(target)(*args)
        if isinstance(result, Generator):
            result = _send_all(result, connection)
        message = ("returned", result)
    except Exception as error:
        message = ("raised", _portable(error))
    except SystemExit as error:
        ended = RuntimeError(f"a module ended the process with status {error.code}")
        message = ("raised", (ended, "".join(traceback.format_exception(error))))
    except BaseException as error:  # a panic of Rust code is no Exception
        failed = RuntimeError(f"{type(error).__name__}: {error}")
        message = ("raised", (failed, "".join(traceback.format_exception(error))))
    with suppress(BrokenPipeError):  # who asked may have been killed
        connection.send(message)
    connection.close()
    # Skip interpreter teardown with torch loaded, which takes up to a second.
    os._exit(0)


def _portable(error: Exception) -> tuple[Exception, str]:
    """Return an exception that pickles, and the traceback that it has here.

    One that does not (it holds a lock, or its ``__init__`` takes other arguments than ``args``)
    becomes a RuntimeError with its name.
    """
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a class's own pickling raises
        return RuntimeError(f"{type(error).__name__}: {error}"), text
    return error, text


def _send_all(results: Generator[Any, None, Any], connection: Connection) -> Any:
    """Send what a generator yields; return what it returns."""
    while True:
        try:
            item = next(results)
        except StopIteration as end:
            return end.value
        connection.send(("yielded", item))
