"""A process that has imported torch once, and from which every rank is forked.

The parent itself never imports torch. Measured against a fresh interpreter a rank, 8 ranks start
in the time of one import. Nothing here knows what a rank does.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any, TypeAlias

from axonlaunch.registry import load
from axonlaunch.system import temporary_folders
from axonlaunch.system.forked_process import ForkedProcess
from axonlaunch.system.process_state import state

Starter: TypeAlias = ForkServerContext | SpawnContext
"""What starts a process: the warm server, or a new interpreter where there is none."""

PRELOADED = ["axonlaunch.launch.local.preload"]
_GRACE_S = 0.3
"""Seconds in which other calls tell what the failure of one did to them."""
_DYING_S = 1.0
"""Seconds that killed processes get at most to be gone: one that nobody reaps never is."""
_IMPORT_S = 300.0
"""Seconds in which the server has to answer first, for which it imports torch."""
_ANSWER_S = 30.0
"""Seconds in which it has to answer from then on: it does nothing but fork."""
_STOPPED_S = 3.0
"""Seconds in which it has to answer while it is stopped (SIGSTOP)."""
_TURN_S = 0.1
_answered: set[int] = set()
"""Servers that have answered."""


class ForkServerError(RuntimeError):
    """The server does not answer: it was stopped or killed, or can't import what ranks need."""


@contextmanager
def warm() -> Iterator[ForkServerContext]:
    """Start the server in the background, and end it on leaving."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with private_files():
        _run_server()
        try:
            yield context
        finally:
            stop()


@contextmanager
def private_files() -> Iterator[None]:
    """Keep what this process and those that it starts share where no other user can reach it."""
    with temporary_folders.folder() as folder, _sockets_in(folder):
        temporary_folders.keep_kernels(folder)
        yield


@contextmanager
def _sockets_in(folder: Path) -> Iterator[None]:
    """Let multiprocessing, here and in what is forked, put its sockets into a folder.

    Its own would be left in TMPDIR by whoever is killed, and has too long a path below a long one.
    """
    process: Any = multiprocessing.current_process()
    settings: dict[str, Any] = process._config
    given = settings.get("tempdir")
    settings["tempdir"] = str(folder)
    try:
        yield
    finally:
        settings["tempdir"] = given  # None: multiprocessing makes its own when it needs it


def _run_server() -> None:
    """Start the server, unless it runs."""
    # Blocked while the server starts, and so in it and whatever it forks until they say otherwise:
    # Ctrl-C in the terminal, its end and a scheduler's word reach all of this group, and are the
    # parent's to handle. Without its server it would know nothing of the ranks any more.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        with without_working_folder():
            resource_tracker.ensure_running()  # it unblocks what is blocked next
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            _server().ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _server() -> Any:
    return forkserver._forkserver


@contextmanager
def without_working_folder() -> Iterator[None]:
    """Keep a new interpreter from importing a ``torch.py`` of the working folder in torch's place.

    What it starts in turn finds the environment as its user left it.
    """
    given = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = given


def stop() -> None:
    """End the server at once, even in the middle of its imports, or stopped."""
    server = _server()
    pid = server._forkserver_pid
    if pid is None:
        return
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = server._forkserver_pid = server._forkserver_address = None


def fork(context: Starter, target: str, *args: Any) -> ForkedProcess:
    """Run ``"module:function"`` in another process; the parent need not import it.

    Raises:
        ForkServerError: The server does not answer.
    """
    process = context.Process(target=_run, args=(target, args), daemon=True)
    if isinstance(context, SpawnContext):
        with without_working_folder():
            process.start()
        return ForkedProcess(process, server=None)
    _run_server()
    pid = _server()._forkserver_pid
    try:
        with _deadline(pid):
            process.start()
    except (EOFError, ConnectionError) as error:
        message = (
            "the fork server, which starts ranks, does not answer: it was stopped or killed, or "
            "had no memory or too few open files (ulimit -n) left; run the command again"
        )
        raise ForkServerError(message) from error
    _answered.add(pid)
    return ForkedProcess(process, server=pid)


@contextmanager
def _deadline(pid: int | None) -> Iterator[None]:
    """Kill the server where it does not answer in time, and with it the wait for an answer.

    Args:
        pid: The server; None where it is not this process' own.
    """
    is_over = threading.Event()

    def watch(pid: int) -> None:
        waited = stopped = 0.0
        # Counted in turns, not by the clock: this process may have been stopped too (Ctrl-Z).
        while waited < (_ANSWER_S if pid in _answered else _IMPORT_S) and stopped < _STOPPED_S:
            if is_over.wait(_TURN_S):
                return
            waited += _TURN_S
            stopped = stopped + _TURN_S if state(pid) in ("T", "t") else 0.0
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    if pid is None:
        yield
        return
    thread = threading.Thread(target=watch, args=(pid,), name="fork server", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def call(context: ForkServerContext, target: str, *args: Any) -> Any:
    """Run ``"module:function"`` in a forked process and return what it returns.

    Raises:
        Exception: What the function raised; its ``__cause__`` shows the traceback that it had in
            the process.
        RuntimeError: The process died without an answer, or raised what can't be pickled.
    """
    try:
        [result] = call_together(context, target, [args])
    except CallsFailedError as failed:
        error = failed.errors[0]
    else:
        return result
    raise error  # out here, so that the caller sees the process's failure and none of ours


def stream(context: ForkServerContext, target: str, *args: Any) -> Generator[Any, None, Any]:
    """Run a generator ``"module:function"`` in a forked process; yield what it yields as it comes.

    Returns:
        What it returned.

    Raises:
        Exception: What the function raised.
        RuntimeError: The process died without an answer.
    """
    one = Call(context, target, args)
    try:
        while True:
            if (error := one.receive()) is not None:
                raise error
            if one.is_done:
                return one.result
            yield one.result
    finally:
        one.end()


class CallsFailedError(Exception):
    """Of calls that depend on each other some failed; the others were ended.

    Attributes:
        errors: What each that failed raised, by its index.
    """

    def __init__(self, errors: dict[int, Exception]) -> None:
        super().__init__("; ".join(f"call {index}: {error}" for index, error in errors.items()))
        self.errors = errors


def call_together(
    context: ForkServerContext, target: str, arguments: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """Run ``"module:function"`` in a forked process for each arguments, all at once.

    Returns:
        What each returned.

    Raises:
        CallsFailedError: One raised, or died without an answer.
    """
    calls = [Call(context, target, args) for args in arguments]
    errors: dict[int, Exception] = {}
    try:
        pending = {one.connection: index for index, one in enumerate(calls)}
        while pending:
            # After one failed the others soon tell what it did to them: which is the cause is for
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
        for one in calls:
            one.end()
    if errors:
        raise CallsFailedError(errors)
    return [one.result for one in calls]


class RemoteTracebackError(Exception):
    """The cause of an exception that was raised in another process: its traceback there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Call:
    """A function that runs in another process.

    Attributes:
        result: What it returned, once ``receive`` took it; of a generator what it yielded last.
        is_done: Whether it returned.
    """

    def __init__(self, context: Starter, target: str, args: tuple[Any, ...]) -> None:
        """Begin to run ``"module:function"``."""
        self.result: Any = None
        self.is_done = False
        self._target = target
        self.connection, theirs = context.Pipe(duplex=False)
        self._process = fork(context, "axonlaunch.system.forkserver:answer", theirs, target, args)
        theirs.close()

    def is_ready(self, *, within_s: float = 0.0) -> bool:
        """Return whether ``receive`` would not wait; wait for that some seconds."""
        return self.connection.poll(within_s)

    def receive(self) -> Exception | None:
        """Take what the function returned, yielded or raised; return the last of these."""
        try:
            kind, content = self.connection.recv()
        except EOFError:
            self._process.join()
            status = self._process.exitcode
            return RuntimeError(f"{self._target} died with status {status or 'unknown'}")
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


def lead_group() -> None:
    """Make this forked process, and what it starts, a group that ends when the parent is gone.

    Ctrl-C in the terminal does not reach it. The kernel's parent-death signal would not do: the
    parent of a forked process is the fork server.
    """
    os.setpgid(0, 0)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def answer(connection: Connection, target: str, args: tuple[Any, ...]) -> None:
    """Call a function and send what it returned, yielded or raised; never returns."""
    os.dup2(2, 1)  # standard output is the command's own
    try:
        result = load(target)(*args)
        if isinstance(result, Generator):
            result = _sent(result, connection)
        message = ("returned", result)
    except Exception as error:
        message = ("raised", _portable(error))
    except SystemExit as error:
        ended = RuntimeError(f"a module ended the process with status {error.code}")
        message = ("raised", (ended, "".join(traceback.format_exception(error))))
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


def _sent(results: Generator[Any, None, Any], connection: Connection) -> Any:
    """Send what a generator yields; return what it returns."""
    while True:
        try:
            item = next(results)
        except StopIteration as end:
            return end.value
        connection.send(("yielded", item))


def _run(target: str, args: tuple[Any, ...]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    sys.excepthook = sys.__excepthook__  # the server's own is terse
    # Locks of libraries are of the kind that they are in a process that a shell started; those of
    # a fork server's children have names, and whoever ends at once leaves them behind.
    multiprocessing.set_start_method(None, force=True)
    # A user's DataLoader may have workers, which Python refuses a process that ends with its
    # parent; they are of the rank's group, and end with it.
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False
    load(target)(*args)
