"""A process that has imported torch once, and from which every rank is forked.

The parent itself never imports torch. Measured against a fresh interpreter a rank, 8 ranks start
in the time of one import. Nothing here knows what a rank does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from axonlaunch.registry import load


@contextmanager
def warm() -> Iterator[ForkServerContext]:
    """Start the server in the background, and end it on leaving."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["axonlaunch.launch.preload"])
    resource_tracker.ensure_running()  # by itself it would unblock what is blocked next
    # Blocked while the server starts, and so in it and whatever it forks until they say otherwise:
    # Ctrl-C in the terminal is the parent's to handle.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _without_working_folder():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    try:
        yield context
    finally:
        stop()


@contextmanager
def _without_working_folder() -> Iterator[None]:
    """Keep a ``torch.py`` in the working folder from being imported in torch's place."""
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
    """End the server at once, even in the middle of its imports."""
    server: Any = forkserver._forkserver
    pid = server._forkserver_pid
    if pid is None:
        return
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = server._forkserver_pid = server._forkserver_address = None


def fork(context: ForkServerContext, target: str, *args: Any) -> ForkServerProcess:
    """Run ``"module:function"`` in a forked process; the parent need not import it."""
    process: ForkServerProcess = context.Process(target=_run, args=(target, args), daemon=True)
    process.start()
    return process


def call(context: ForkServerContext, target: str, *args: Any) -> Any:
    """Run ``"module:function"`` in a forked process and return what it returns.

    Raises:
        Exception: What the function raised.
        RuntimeError: The process died without an answer.
    """
    ours, theirs = context.Pipe(duplex=False)
    process = fork(context, "axonlaunch.launch.forkserver:answer", theirs, target, args)
    theirs.close()
    try:
        kind, content = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{target} died with status {process.exitcode}") from None
    except BaseException:
        process.kill()
        raise
    finally:
        ours.close()
    process.join()
    if kind == "raised":
        raise content
    return content


def answer(connection: Connection, target: str, args: tuple[Any, ...]) -> None:
    """Call a function and send what it returned or raised; never returns."""
    os.dup2(2, 1)  # standard output is the command's own
    try:
        message = ("returned", load(target)(*args))
    except Exception as error:
        message = ("raised", error)
    except SystemExit as error:
        message = ("raised", RuntimeError(f"a module ended the process with status {error.code}"))
    connection.send(message)
    connection.close()
    # Skip interpreter teardown with torch loaded, which takes up to a second.
    os._exit(0)


def _run(target: str, args: tuple[Any, ...]) -> None:
    load(target)(*args)
