"""Runs commands and scripts as forks of a running server, as a run forks its ranks.

Importing torch is most of a short program's time. Tests of a program's results share one server,
also among pytest's workers. Tests of starting, printing and ending run the program as a user does.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

from axonlaunch.system.processes import forkserver as ours

SERVER: Any = forkserver._forkserver
# The server's address and, from Python 3.14, its authentication key.
NEEDED = ("_forkserver_address", "_forkserver_authkey")
WARMED = "support.warmed"
"""Module that the server imports before the modules of ranks. It is in this package."""
TRANSFORMERS = "axonlaunch.models.hf.reading.preload"
COMPILER = "axonlaunch.planning.tracing.preload"

Server = dict[str, Any]


@contextmanager
def serve(*, others: Sequence[str] = (COMPILER, TRANSFORMERS)) -> Iterator[Server]:
    """Run a server; yield how to reach it.

    Args:
        others: Additional modules to import, which only some commands need.
    """
    # Commands that workers start as new interpreters inherit it, so that of the user is kept.
    folders = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    preloaded = mock.patch.object(ours, "PRELOADED", [WARMED, *others, *ours.PRELOADED])
    with mock.patch.dict(os.environ, path), preloaded, ours.warm():
        yield {name: getattr(SERVER, name) for name in NEEDED if hasattr(SERVER, name)}


@contextmanager
def reached(
    server: Server, *, preload: Sequence[str] = (), around: Callable[..., None] | None = None
) -> Iterator[ForkServerContext]:
    """Replace ``warm``: use the running server, and leave it running.

    Args:
        server: State of the forkserver module that reaches the server.
        preload: Ignored; the modules are imported later when they are needed.
        around: Function that is called instead of each forked function, with it as an argument.
    """
    del preload
    vars(SERVER).update(server)
    SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # others keep the server alive
    SERVER.ensure_running = lambda: None
    yield get_context("forkserver") if around is None else _Around(around)


class _Around(ForkServerContext):
    """Forks ``around`` instead of the target function."""

    def __init__(self, around: Callable[..., None]) -> None:
        super().__init__()
        self._around = around

    def Process(self, *, target: Any, args: tuple[Any, ...], daemon: bool) -> Any:  # type: ignore[override]  # noqa: N802
        there = partial(self._around, target)
        return get_context("forkserver").Process(target=there, args=args, daemon=daemon)


def placed(namespace: str, function: Callable[..., None], *args: Any) -> None:
    """Run a function in a network namespace. All threads that it starts are in the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    function(*args)


class Forked:
    """A running program with the interface of ``subprocess.Popen``, as far as tests use it."""

    def __init__(
        self,
        program: Callable[..., None],
        *arguments: Any,
        folder: Path,
        environment: dict[str, str],
        console: str | None = None,
    ) -> None:
        """Start a program.

        Args:
            program: A module-level function.
            arguments: Positional arguments of the function.
            folder: Working directory.
            environment: All environment variables.
            console: File for the printed output; None keeps the output for ``communicate``.
        """
        # The folder removes itself, even if a test neither waits nor closes anything.
        self._outputs = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._files = [Path(self._outputs.name, name) for name in ("output", "errors")]
        weakref.finalize(self, self._outputs.cleanup)
        for file in self._files:
            file.touch()
        names = [console or str(file) for file in self._files]
        # Not a daemon, because it may have children.
        self._process = get_context("forkserver").Process(
            target=_run,
            args=(program, arguments, folder, environment, os.sched_getaffinity(0), names),
            daemon=False,
        )
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def printed(self) -> str:
        """Return the output printed until now."""
        return self._files[0].read_text()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.join(timeout)
        if self.returncode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired("a forked program", timeout or 0)
        output, errors = [file.read_text() for file in self._files]
        return output, errors


def _run(
    program: Callable[..., None],
    arguments: tuple[Any, ...],
    folder: Path,
    environment: dict[str, str],
    cores: set[int],
    outputs: list[str],
) -> None:
    """Run the program as if a shell had started it."""
    assert WARMED in sys.modules
    blocked_by_the_server = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked_by_the_server)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.sched_setaffinity(0, cores)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, name in enumerate(outputs, start=1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), descriptor)
    program(*arguments)


def command(server: Server, *overrides: str, around: Callable[..., None] | None = None) -> None:
    """Run the ``axonlaunch`` command."""
    from axonlaunch.cli import app
    from axonlaunch.cli.training import train

    ours.warm = partial(reached, server, around=around)
    vars(train)["STARTED"] = time.time()
    sys.argv = ["axonlaunch", *overrides]
    app.run_command()


def served_script(server: Server, path: str, *overrides: str) -> None:
    """Run a Python file like ``script``; its runs and estimates use the server."""
    ours.warm = partial(reached, server)
    script(path, *overrides)


def script(path: str, *overrides: str) -> None:
    """Run a Python file with warnings as errors."""
    warnings.simplefilter("error")
    sys.argv = [path, *overrides]
    sys.path.insert(0, str(Path(path).resolve().parent))  # as python does
    runpy.run_path(path, run_name="__main__")
