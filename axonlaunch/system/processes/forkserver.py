"""The fork server: a process that imports torch once and from which every rank is forked.

The parent process never imports torch. With the server, 8 ranks start in the time of one import of
torch.
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
from multiprocessing import forkserver, resource_tracker, spawn
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any, TypeAlias, cast

from axonlaunch.system.processes import temporary_folders
from axonlaunch.system.processes.forked_process import ForkedProcess
from axonlaunch.system.processes.process_state import state
from axonlaunch.system.processes.targets import load_target

Starter: TypeAlias = ForkServerContext | SpawnContext
"""Context that starts processes: forked from the warm server, or as a new interpreter."""

PRELOADED = ["axonlaunch.launch.local.preload"]
_COMPILER = "axonlaunch.planning.tracing.preload"
_TRANSFORMERS = "axonlaunch.models.hf.reading.preload"
_IMPORT_S = 300.0
"""Timeout of the server's first answer in seconds, before which it imports torch."""
_ANSWER_S = 30.0
"""Timeout of later answers in seconds, for which the server only forks."""
_STOPPED_S = 3.0
"""Timeout of an answer in seconds while the server is stopped (SIGSTOP)."""
_ENDING_S = 1.0
"""Maximum seconds to wait for the end of a server that has closed a connection."""
_TURN_S = 0.1
_answered: set[int] = set()
"""Process ids of servers that have answered."""
_starting = threading.Lock()
"""Held while a process starts without the main module."""


class ForkServerError(RuntimeError):
    """The server does not answer: it was stopped or killed, or it can't import a module."""


def modules_to_preload(*, compiler: bool, transformers: bool) -> list[str]:
    """Return the names of modules to preload, for ``warm``.

    Args:
        compiler: Whether to preload torch's compiler.
        transformers: Whether to preload transformers.
    """
    return [*([_COMPILER] if compiler else []), *([_TRANSFORMERS] if transformers else [])]


@contextmanager
def warm(*, preload: Sequence[str] = ()) -> Iterator[ForkServerContext]:
    """Start the server in the background and end it with the context.

    A server that is already running is used and left running.

    Args:
        preload: Modules to import in addition to the usual ones.
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
    """Yield a function that starts the server on its first call; end the server with the context.

    Args:
        preload: Modules to import in addition to the usual ones.
    """
    with ExitStack() as stack:

        @functools.cache
        def server() -> ForkServerContext:
            return stack.enter_context(warm(preload=preload))

        yield server


@contextmanager
def private_files() -> Iterator[None]:
    """Keep files shared with started processes in a folder that only this user can enter."""
    with temporary_folders.temporary_folder() as folder, _sockets_in(folder):
        temporary_folders.keep_kernels(folder)
        yield


@contextmanager
def _sockets_in(folder: Path) -> Iterator[None]:
    """Make multiprocessing put its sockets into a folder, here and in forked processes.

    Its default folder is in TMPDIR. Killed processes leave it behind, and its path is too long for
    sockets if TMPDIR is long.
    """
    process: Any = multiprocessing.current_process()
    settings: dict[str, Any] = process._config
    configured = settings.get("tempdir")
    settings["tempdir"] = str(folder)
    try:
        yield
    finally:
        settings["tempdir"] = configured  # None: multiprocessing creates a folder when needed


def _run_server() -> None:
    """Start the server if it does not run."""
    # These signals are blocked while the server starts. The server and the processes that it forks
    # inherit that until they unblock them. Ctrl-C, the end of the terminal and a scheduler's
    # signals reach the whole process group, but only the parent must handle them. If they ended
    # the server, the parent could not learn the ranks' status any more.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        with without_working_folder():
            resource_tracker.ensure_running()  # unblocks the signals that the next line blocks
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            _server().ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _server() -> Any:
    return forkserver._forkserver


@contextmanager
def without_working_folder() -> Iterator[None]:
    """Prevent new interpreters from importing a ``torch.py`` in the working folder as torch.

    Processes that such an interpreter starts see the user's environment unchanged.
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
    """Kill the server, even while it imports modules or is stopped."""
    server = _server()
    pid = server._forkserver_pid
    if pid is None:
        return
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = server._forkserver_pid = server._forkserver_address = None


class _ByName:
    """Pickles as a reference to a function, ``"module:function"``, which is imported on unpickling.

    ``_ByName("a.b:main")`` in the parent becomes the function ``a.b.main`` in the forked process,
    so the parent does not import it and the process needs no wrapper function.
    """

    def __init__(self, target: str) -> None:
        self._target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return load_target, (self._target,)


def fork(context: Starter, target: str, *args: Any) -> ForkedProcess:
    """Run ``"module:function"`` in another process without importing it here.

    Args:
        context: Context that starts the process.
        target: Name of the function.
        args: Picklable arguments of the function.

    Raises:
        ForkServerError: The server does not answer.
        OSError: The system has not enough resources for the server, such as open files.
    """
    # In the other process the unpickled object is a function.
    function = cast("Callable[..., object]", _ByName(target))
    process = context.Process(target=function, args=args, daemon=True)
    if isinstance(context, SpawnContext):
        with without_working_folder(), _without_main_module():
            process.start()
        return ForkedProcess(process, server=None)
    _run_server()
    pid = _server()._forkserver_pid
    try:
        with _deadline(pid), _without_main_module():
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


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Start processes that do not import the main module of this process.

    multiprocessing imports it in every process, because functions may be defined there. ``fork``
    names functions of other modules. A script that trains at its top level would otherwise be run
    again by each rank.
    """
    with _starting:
        original = spawn.get_preparation_data

        def without_main(name: str) -> dict[str, Any]:
            data = original(name)
            return {key: value for key, value in data.items() if not key.startswith("init_main")}

        setattr(spawn, "get_preparation_data", without_main)  # noqa: B010
        try:
            yield
        finally:
            setattr(spawn, "get_preparation_data", original)  # noqa: B010


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
    """Kill the server if it does not answer in time, which ends the wait for its answer.

    Args:
        pid: Process id of the server; None if this process did not start it.
    """
    is_over = threading.Event()

    def watch(pid: int) -> None:
        waited = stopped = 0.0
        # Counts turns instead of clock time, because this process may be stopped too (Ctrl-Z).
        while waited < (_ANSWER_S if pid in _answered else _IMPORT_S) and stopped < _STOPPED_S:
            if is_over.wait(_TURN_S):
                return
            waited += _TURN_S
            stopped = stopped + _TURN_S if state(pid) in ("T", "t") else 0.0
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            # Wait for its end. Otherwise the next call would try to use it.
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
    """Reset inherited state of the server, as if a shell had started this process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    sys.excepthook = sys.__excepthook__  # the server has a hook for short messages
    # Libraries then create the same kind of locks as in a process started by a shell. The locks of
    # children of a fork server have names and are left behind if a process ends without cleanup.
    multiprocessing.set_start_method(None, force=True)
    # Python does not allow daemon processes to have children, but a user's DataLoader may need
    # workers. They are in the rank's process group and end with it.
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False


def lead_group() -> None:
    """Put this forked process and its children into a group that is killed if the parent ends.

    Ctrl-C in the terminal does not reach the group. The kernel's parent-death signal can't be used,
    because the parent of a forked process is the fork server.
    """
    os.setpgid(0, 0)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
