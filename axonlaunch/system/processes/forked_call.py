"""Calls functions in forked processes and passes on their results, yielded values and exceptions.

A function is named as ``"module:function"``, so the caller does not import it.
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

from axonlaunch.system.processes.forked_process import ProcessDiedError
from axonlaunch.system.processes.forkserver import Starter, become_independent, fork
from axonlaunch.system.processes.targets import load_target

_GRACE_S = 0.3
"""Seconds to wait for failures of other calls after the first failure."""
_DYING_S = 1.0
"""Maximum seconds to wait for the end of killed processes. One that is never reaped stays."""


def call(context: Starter, target: str, *args: Any, task: str = "") -> Any:
    """Run ``"module:function"`` in a forked process and return its result.

    Args:
        context: Context that starts the process.
        target: Name of the function.
        args: Arguments of the function.
        task: Task of the process, such as "estimating memory"; used in the message if it dies.

    Raises:
        Exception: The exception of the function; its ``__cause__`` shows the traceback in the
            process.
        ProcessDiedError: The process died without an answer.
        RuntimeError: The function raised an exception that can't be pickled.
    """
    try:
        [result] = call_together(context, target, [args], task=task)
    except CallsFailedError as failed:
        error = failed.errors[0]
    else:
        return result
    raise error  # outside of the except block, so that the exception has no context


def stream(
    context: ForkServerContext, target: str, *args: Any, task: str = ""
) -> Generator[Any, None, Any]:
    """Run a generator ``"module:function"`` in a forked process and yield its values immediately.

    The arguments are those of ``call``.

    Returns:
        The return value of the generator.

    Raises:
        Exception: The exception of the generator.
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
    """Some of several dependent calls failed; the other calls were ended.

    Attributes:
        errors: Exceptions by index of the failed call.
    """

    def __init__(self, errors: dict[int, Exception]) -> None:
        super().__init__("; ".join(f"call {index}: {error}" for index, error in errors.items()))
        self.errors = errors


def call_together(
    context: Starter, target: str, arguments: Sequence[tuple[Any, ...]], *, task: str = ""
) -> list[Any]:
    """Run ``"module:function"`` in several forked processes at the same time.

    Args:
        context: Context that starts the processes.
        target: Name of the function.
        arguments: Arguments of each call.
        task: Task of the processes, as in ``call``.

    Returns:
        The result of each call.

    Raises:
        CallsFailedError: A call raised an exception or its process died without an answer.
    """
    calls = [ForkedCall(context, target, args, task=task) for args in arguments]
    errors: dict[int, Exception] = {}
    try:
        pending = {call.connection: index for index, call in enumerate(calls)}
        while pending:
            # After one failure other calls soon fail because of it. The caller finds the cause.
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
    """Cause of an exception from another process; contains the traceback in that process."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class ForkedCall:
    """A function call in another process.

    Attributes:
        result: Received result, or the last received value of a generator.
        is_done: Whether the function has ended.
    """

    def __init__(
        self, context: Starter, target: str, args: tuple[Any, ...], *, task: str = ""
    ) -> None:
        """Start ``"module:function"``; the arguments are those of ``call``."""
        self.result: Any = None
        self.is_done = False
        self._task = task or f"running {target}"
        self.connection, sender = context.Pipe(duplex=False)
        self._process = fork(
            context, "axonlaunch.system.processes.forked_call:answer", sender, target, args
        )
        sender.close()

    def is_ready(self, *, within_s: float = 0.0) -> bool:
        """Return whether a message can be received, after waiting at most ``within_s`` seconds."""
        return self.connection.poll(within_s)

    def receive(self) -> Exception | None:
        """Receive the next message: store a value in ``result``, or return an exception."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError):  # OSError: the process died in the middle of a message
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
            # Tracebacks can't be pickled, so the text is shown as the cause, as concurrent.futures
            # does.
            error.__cause__ = RemoteTracebackError(text)
            return error
        self.result = content
        return None

    def end(self) -> None:
        """End the process and its process group."""
        if not self._process.has_ended:
            self._process.kill_group()
            self._process.join()
            _wait_for_group(self._process.pid)
        self._process.join()
        self.connection.close()


def _wait_for_group(leader: int) -> None:
    """Wait until the killed processes of a group have ended."""
    deadline = time.monotonic() + _DYING_S
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(leader, 0)
            time.sleep(0.005)


def answer(connection: Connection, target: str, args: tuple[Any, ...]) -> None:
    """Call a function and send its result, yielded values or exception. This never returns."""
    become_independent()
    os.dup2(2, 1)  # standard output is only for the command's result
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
    except BaseException as error:  # a panic in Rust code is not an Exception
        failed = RuntimeError(f"{type(error).__name__}: {error}")
        message = ("raised", (failed, "".join(traceback.format_exception(error))))
    with suppress(BrokenPipeError):  # the caller may have been killed
        connection.send(message)
    connection.close()
    # Skip interpreter teardown with torch loaded, which takes up to a second.
    os._exit(0)


def _portable(error: Exception) -> tuple[Exception, str]:
    """Return a picklable exception and the traceback as text.

    An exception that can't be pickled (because it holds a lock, or because its ``__init__`` takes
    other arguments than ``args``) becomes a RuntimeError with its name.
    """
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # custom pickling code may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}"), text
    return error, text


def _send_all(results: Generator[Any, None, Any], connection: Connection) -> Any:
    """Send the values of a generator, and return its return value."""
    while True:
        try:
            item = next(results)
        except StopIteration as end:
            return end.value
        connection.send(("yielded", item))
