"""Commands and scripts, forked, as a run's ranks are, from a server that was there before.

Importing torch is most of a short program's time. Tests of what a program does share one server,
pytest's workers too; tests of how it starts, prints and ends run it as a user does.
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
# Where the server listens and, from Python 3.14, the key that it asks for.
NEEDED = ("_forkserver_address", "_forkserver_authkey")
WARMED = "warmed"
"""What the server imports beside what ranks do, and before it: a module beside this one."""
TRANSFORMERS = "axonlaunch.models.hf.reading.preload"
COMPILER = "axonlaunch.planning.tracing.preload"

Server = dict[str, Any]


@contextmanager
def serve(*, others: Sequence[str] = (COMPILER, TRANSFORMERS)) -> Iterator[Server]:
    """Keep a server; yield how it is reached.

    Args:
        others: Modules that it imports too: what not every command needs.
    """
    path = {"PYTHONPATH": str(Path(__file__).parent)}
    preloaded = mock.patch.object(ours, "PRELOADED", [WARMED, *others, *ours.PRELOADED])
    with mock.patch.dict(os.environ, path), preloaded, ours.warm():
        yield {name: getattr(SERVER, name) for name in NEEDED if hasattr(SERVER, name)}


@contextmanager
def reached(
    server: Server, *, preload: Sequence[str] = (), around: Callable[..., None] | None = None
) -> Iterator[ForkServerContext]:
    """Stand in for ``warm``: use the server that is there, and leave it running.

    Args:
        server: How it is reached.
        preload: Not imported there: what asks for it imports it later.
        around: Calls what it forks, with its arguments, in its place.
    """
    del preload
    vars(SERVER).update(server)
    SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # others keep it alive
    SERVER.ensure_running = lambda: None
    yield get_context("forkserver") if around is None else _Around(around)


class _Around(ForkServerContext):
    """Forks what a function calls."""

    def __init__(self, around: Callable[..., None]) -> None:
        super().__init__()
        self._around = around

    def Process(self, *, target: Any, args: tuple[Any, ...], daemon: bool) -> Any:  # type: ignore[override]  # noqa: N802
        there = partial(self._around, target)
        return get_context("forkserver").Process(target=there, args=args, daemon=daemon)


def placed(namespace: str, function: Callable[..., None], *args: Any) -> None:
    """Run a function in a namespace of the network, which all threads that it starts are in."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    function(*args)


class Forked:
    """A program that runs; what ``subprocess.Popen`` has of the same names is the same."""

    def __init__(
        self,
        program: Callable[..., None],
        *arguments: Any,
        folder: Path,
        environment: dict[str, str],
        console: str | None = None,
    ) -> None:
        """Start it.

        Args:
            program: A function of a module.
            arguments: Its own.
            folder: Where it runs.
            environment: All variables that it sees.
            console: The file that takes what it prints; None keeps it for ``communicate``.
        """
        # A folder that removes itself, also where a test waits for nothing and closes nothing.
        self._outputs = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._files = [Path(self._outputs.name, name) for name in ("output", "errors")]
        weakref.finalize(self, self._outputs.cleanup)
        for file in self._files:
            file.touch()
        names = [console or str(file) for file in self._files]
        # No daemon: it may have children.
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
        """Return what it has printed so far."""
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
    """Become what the shell would have started."""
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
    """Be the ``axonlaunch`` command."""
    from axonlaunch.cli import app
    from axonlaunch.cli.training import train

    ours.warm = partial(reached, server, around=around)
    train.STARTED = time.time()
    sys.argv = ["axonlaunch", *overrides]
    app.run_command()


def served_script(server: Server, path: str, *overrides: str) -> None:
    """Run a Python file like ``script``; its runs and estimates use the server."""
    ours.warm = partial(reached, server)
    script(path, *overrides)


def script(path: str, *overrides: str) -> None:
    """Be a Python file whose warnings are errors."""
    warnings.simplefilter("error")
    sys.argv = [path, *overrides]
    sys.path.insert(0, str(Path(path).resolve().parent))  # as python does
    runpy.run_path(path, run_name="__main__")
