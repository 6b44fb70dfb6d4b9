"""A process that has imported torch once, and from which every rank is forked.

The parent itself never imports torch. Measured against a fresh interpreter a rank, 8 ranks start
in the time of one import. Nothing here knows what a rank does.
"""

from __future__ import annotations

import errno
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any, TypeAlias, cast

from axonlaunch.system import temporary_folders
from axonlaunch.system.forked_process import ForkedProcess
from axonlaunch.system.process_state import state
from axonlaunch.system.targets import load_target

Starter: TypeAlias = ForkServerContext | SpawnContext
"""What starts a process: the warm server, or a new interpreter where there is none."""

PRELOADED = ["axonlaunch.launch.local.preload"]
_IMPORT_S = 300.0
"""Seconds in which the server has to answer first, for which it imports torch."""
_ANSWER_S = 30.0
"""Seconds in which it has to answer from then on: it does nothing but fork."""
_STOPPED_S = 3.0
"""Seconds in which it has to answer while it is stopped (SIGSTOP)."""
_ENDING_S = 1.0
"""Seconds that a server takes at most to end once it has closed a connection."""
_TURN_S = 0.1
_answered: set[int] = set()
"""Servers that have answered."""


class ForkServerError(RuntimeError):
    """The server does not answer: it was stopped or killed, or can't import what ranks need."""


@contextmanager
def warm(*, preload: Sequence[str] = ()) -> Iterator[ForkServerContext]:
    """Start the server in the background, and end it on leaving; one that runs is left running.

    Args:
        preload: Modules to import beside the usual ones.
    """
    context = multiprocessing.get_context("forkserver")
    if _server()._forkserver_pid is not None:
        yield context
        return
    context.set_forkserver_preload([*PRELOADED, *preload])
    with private_files():
        _run_server()
        try:
            yield context
        finally:
            stop()


@contextmanager
def on_demand(*, preload: Sequence[str] = ()) -> Iterator[Callable[[], ForkServerContext]]:
    """Return what starts the server when it is first called, and end it on leaving.

    Args:
        preload: Modules to import beside the usual ones.
    """
    with ExitStack() as stack:

        @functools.cache
        def server() -> ForkServerContext:
            return stack.enter_context(warm(preload=preload))

        yield server


@contextmanager
def private_files() -> Iterator[None]:
    """Keep what this process and those that it starts share where no other user can reach it."""
    with temporary_folders.temporary_folder() as folder, _sockets_in(folder):
        temporary_folders.keep_kernels(folder)
        yield


@contextmanager
def _sockets_in(folder: Path) -> Iterator[None]:
    """Let multiprocessing, here and in what is forked, put its sockets into a folder.

    Its own would be left in TMPDIR by whoever is killed, and has too long a path below a long one.
    """
    process: Any = multiprocessing.current_process()
    settings: dict[str, Any] = process._config
    configured = settings.get("tempdir")
    settings["tempdir"] = str(folder)
    try:
        yield
    finally:
        settings["tempdir"] = configured  # None: multiprocessing makes its own when it needs it


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
    safe_path = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if safe_path is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = safe_path


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


class _ByName:
    """A function that pickles as its name, ``"module:function"``, and is found where it arrives.

    So ``_ByName("a.b:main")`` here is ``a.b.main`` in the forked process: what sends it need not
    import it, and nothing stands between the process and its function.
    """

    def __init__(self, target: str) -> None:
        self._target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return load_target, (self._target,)


def fork(context: Starter, target: str, *args: Any) -> ForkedProcess:
    """Run ``"module:function"`` in another process; the parent need not import it.

    Args:
        context: What starts it.
        target: Of the function. It calls ``enter`` first, unless it only waits.
        args: Its own, which pickle.

    Raises:
        ForkServerError: The server does not answer.
        OSError: The system refused what the server needs, such as another open file.
    """
    # Typed as a function: that is what it is when the process calls it.
    function = cast("Callable[..., object]", _ByName(target))
    process = context.Process(target=function, args=args, daemon=True)
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
        if _exit_status(pid) == errno.EMFILE:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error
        message = (
            "the fork server, which starts ranks, does not answer: it was stopped or killed, or "
            "had no memory or too few open files (ulimit -n) left; run the command again"
        )
        raise ForkServerError(message) from error
    _answered.add(pid)
    return ForkedProcess(process, server=pid)


def _exit_status(pid: int | None) -> int | None:
    """Return the exit status of a server that is about to end; None for a signal, or if it runs.

    The preloaded module ends a server that may have no more open files with ``errno.EMFILE``.
    """
    deadline = time.monotonic() + _ENDING_S
    while pid is not None and time.monotonic() < deadline:
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:  # another process started it
            return None
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else None
        time.sleep(0.01)
    return None


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
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            # Until it has ended the next call would take it for one that answers.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

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


def become_independent() -> None:
    """Make this forked process what it would be if a shell had started it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    sys.excepthook = sys.__excepthook__  # the server's own is terse
    # Locks of libraries are of the kind that they are in a process that a shell started; those of
    # a fork server's children have names, and whoever ends at once leaves them behind.
    multiprocessing.set_start_method(None, force=True)
    # A user's DataLoader may have workers, which Python refuses a process that ends with its
    # parent; they are of the rank's group, and end with it.
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False


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
