"""Runs functions in forked copies of this process, a few at a time, and returns their results.

Changes that a copy makes, in torch or elsewhere, end with it. The only exception is a shared memory
dictionary, to which every copy can add entries. Exceptions of a function are raised here.
"""

from __future__ import annotations

import gc
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

from axonlaunch.system.processes.forked_process import ProcessDiedError

Result = TypeVar("Result")

_sharing_cores = 1
"""Number of copies, this one included, that share the cores of this process."""


def map_forked(
    functions: Sequence[Callable[[], Result]],
    *,
    task: str = "running a function",
    at_once: int | None = None,
    memory: dict[Any, Any] | None = None,
    until: float | None = None,
) -> list[Result]:
    """Call each function in a separate process.

    Args:
        functions: Functions to call. Their results must be picklable; the functions need not be.
        task: Task of each process, such as "tracing a step"; used in the message if one dies.
        at_once: Maximum number of concurrent processes; None allows one for each core of this
            process. The copies share its cores for functions that they call likewise.
        memory: Dictionary in this process. Entries that a copy adds are added to it, and copies
            that begin later see them. Entries must be picklable.
        until: Deadline in ``time.monotonic()``; None waits without limit.

    Returns:
        Results of the functions, in order.

    Raises:
        Exception: The exception of the first function that failed.
        TimeoutError: The deadline has passed before all functions were done.
        ProcessDiedError: A process ended without a result.
    """
    shared: dict[Any, Any] = {} if memory is None else memory
    limit = at_once or share_of_cores()
    sharing = _sharing_cores * min(limit, len(functions))
    running: dict[int, tuple[int, int]] = {}
    results: dict[int, Result] = {}
    waiting = list(enumerate(functions))
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                index, function = waiting.pop(0)
                running[index] = _fork(function, shared, sharing)
            left = None if until is None else max(0.0, until - time.monotonic())
            ready = wait([pipe for _, pipe in running.values()], timeout=left)
            if not ready:
                raise TimeoutError(f"{len(running) + len(waiting)} functions are not done")
            for index in [n for n, (_, pipe) in running.items() if pipe in ready]:
                results[index], added = _receive(*running.pop(index), task=task)
                shared.update(added)
    finally:
        for process, pipe in running.values():
            os.kill(process, 9)
            os.close(pipe)
            os.waitpid(process, 0)
    return [results[index] for index in range(len(functions))]


def share_of_cores() -> int:
    """Return the number of cores of this process, divided by the copies that share them."""
    return max(1, len(os.sched_getaffinity(0)) // _sharing_cores)


def _fork(function: Callable[[], Any], memory: dict[Any, Any], sharing: int) -> tuple[int, int]:
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns that locks of other threads stay locked in the copy. It takes no locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        os.close(writer)
        return process, reader
    try:
        global _sharing_cores
        _sharing_cores = sharing
        os.close(reader)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(_outcome(function, memory))
    finally:  # the copy must never continue with the code of its parent
        os._exit(0)


def _outcome(function: Callable[[], Any], memory: dict[Any, Any]) -> bytes:
    previous_size = len(memory)
    try:
        torch.set_num_threads(1)
        gc.freeze()  # what the parent holds is not garbage; collections of the copy skip it
        result = function()
        return pickle.dumps((True, result, [*memory.items()][previous_size:]))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        try:
            content = pickle.dumps((False, error, ()))
            pickle.loads(content)
        except Exception:
            return pickle.dumps((False, RuntimeError(text), ()))
        error.add_note(text)
        return pickle.dumps((False, error, ()))


def _receive(process: int, pipe: int, *, task: str) -> Any:
    with os.fdopen(pipe, "rb") as file:
        content = file.read()
    _, status = os.waitpid(process, 0)
    if status or not content:  # the process may have died while writing
        raise ProcessDiedError(task, os.waitstatus_to_exitcode(status))
    done, result, added = pickle.loads(content)
    if not done:
        raise result
    return result, added
