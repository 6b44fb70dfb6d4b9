"""Runs functions in forked copies of this process, a few at a time, and returns their results.

What a copy changes, in torch or elsewhere, ends with it, but for what it adds to a memory that all
of them are given. It refuses nothing: what a function raises is raised here.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeVar

import torch

from axonlaunch.system.forked_process import ProcessDiedError

Result = TypeVar("Result")


def map_forked(
    functions: Sequence[Callable[[], Result]],
    *,
    task: str = "running a function",
    at_once: int | None = None,
    memory: dict[Any, Any] | None = None,
    until: float | None = None,
) -> list[Result]:
    """Call each function in a process of its own.

    Args:
        functions: Their results can be pickled; they themselves need not be.
        task: What each process does, as in "tracing a step", for the message when one dies.
        at_once: Processes that run side by side; None: one a core of this process.
        memory: This process's: what a copy adds to it is added here, and copies that begin later
            find it there. It can be pickled.
        until: ``time.monotonic()`` after which nothing is waited for; None: never.

    Returns:
        Their results, in order.

    Raises:
        Exception: What the first function that failed raised.
        TimeoutError: It is ``until``, and some are not done.
        ProcessDiedError: A process ended without a result.
    """
    known: dict[Any, Any] = {} if memory is None else memory
    limit = at_once or len(os.sched_getaffinity(0))
    running: dict[int, tuple[int, int]] = {}
    results: dict[int, Result] = {}
    waiting = list(enumerate(functions))
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                index, function = waiting.pop(0)
                running[index] = _fork(function, known)
            left = None if until is None else max(0.0, until - time.monotonic())
            answering = wait([pipe for _, pipe in running.values()], timeout=left)
            if not answering:
                raise TimeoutError(f"{len(running) + len(waiting)} functions are not done")
            for index in [n for n, (_, pipe) in running.items() if pipe in answering]:
                results[index], learned = _answer(*running.pop(index), task=task)
                known.update(learned)
    finally:
        for process, pipe in running.values():
            os.kill(process, 9)
            os.close(pipe)
            os.waitpid(process, 0)
    return [results[index] for index in range(len(functions))]


def _fork(function: Callable[[], Any], memory: dict[Any, Any]) -> tuple[int, int]:
    ours, theirs = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # From Python 3.12: other threads' locks stay as they are in the copy. It takes none.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        os.close(theirs)
        return process, ours
    try:
        os.close(ours)
        with os.fdopen(theirs, "wb") as pipe:
            pipe.write(_outcome(function, memory))
    finally:  # whatever happens, the copy must not continue as its parent
        os._exit(0)


def _outcome(function: Callable[[], Any], memory: dict[Any, Any]) -> bytes:
    before = len(memory)
    try:
        torch.set_num_threads(1)
        result = function()
        return pickle.dumps((True, result, [*memory.items()][before:]))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        try:
            content = pickle.dumps((False, error, ()))
            pickle.loads(content)
        except Exception:
            return pickle.dumps((False, RuntimeError(text), ()))
        error.add_note(text)
        return pickle.dumps((False, error, ()))


def _answer(process: int, pipe: int, *, task: str) -> Any:
    with os.fdopen(pipe, "rb") as file:
        content = file.read()
    _, status = os.waitpid(process, 0)
    if status or not content:  # it may have died while it wrote
        raise ProcessDiedError(task, os.waitstatus_to_exitcode(status))
    done, result, learned = pickle.loads(content)
    if not done:
        raise result
    return result, learned
