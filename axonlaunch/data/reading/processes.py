"""Worker processes that read samples ahead, in order: the workers of torch's ``DataLoader``.

They are forked from the rank, so the dataset need not be picklable. A worker that fails, dies or
hangs ends the reading with an error that names the sample.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import ForkContext
from multiprocessing.process import BaseProcess
from typing import IO, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset

from axonlaunch.data.reading.progress import ProgressTable, end_task, record_in
from axonlaunch.data.reading.sample_error import (
    SampleError,
    WorkerDiedError,
    WorkerFailure,
    WorkerTracebackError,
    naming,
)
from axonlaunch.system.processes.parent_death import end_with_parent

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_Loaded = TypeVar("_Loaded")

_STACK_SIGNAL = signal.SIGUSR1
_CHECK_S = 1.0
"""Seconds between checks for a worker that hangs."""
_STACK_S = 2.0
"""Maximum seconds to wait for the stack of a worker that hangs."""
_FINISH_S = 1.0
"""Seconds that workers have to finish a sample at the end; it may write a cache."""
_DYING_S = 3.0
"""Maximum seconds to wait for the exit status of a worker after an error of its connection."""
_AHEAD = 2
"""Tasks that are assigned to each worker ahead."""
_HINTS = {
    "SIGKILL": "; the kernel does this if the host has no free memory: use fewer data.workers",
    "SIGBUS": "; /dev/shm, through which processes pass samples, may be full: make it larger, or "
    "use fewer data.workers",
}


@dataclass(frozen=True)
class _Tasks(Dataset[Any], Generic[_Task, _Result]):
    """Results of tasks, as the dataset of a ``DataLoader``."""

    function: Callable[[_Task], _Result]
    description: str

    def __getitem__(self, task: _Task) -> tuple[_Result] | WorkerFailure:
        try:
            result = self.function(task)
            with naming(f"{self.description}: passing a batch to the rank's process"):
                return (_to_shared_memory(result),)
        except Exception as error:
            return WorkerFailure.of(error)
        finally:
            end_task()


def _to_shared_memory(result: Any) -> Any:
    """Move tensors to shared memory, and check that the rest can be pickled.

    The queue does both in a thread, where exceptions are lost.
    """

    def share(tensor: Tensor) -> None:
        tensor.share_memory_()

    pickle.dumps(tree_map_only(Tensor, share, result.content))
    return result


class _Loader(DataLoader[Any]):
    """A ``DataLoader`` without the warning about more workers than cores: they may wait for disks.

    The warning would count only the cores to which the rank is pinned, in each evaluation.
    """

    def check_worker_number_rationality(self) -> None:
        """Accept any number of workers."""


class _Context(ForkContext):
    """The context of forked processes, which records those that it starts."""

    def __init__(self) -> None:
        self.started: list[BaseProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:  # type: ignore[override] # noqa: N802
        process = super().Process(*args, **kwargs)
        self.started.append(process)
        return process


@dataclass
class WorkerProcesses(Generic[_Task, _Result]):
    """Processes that compute a function of tasks ahead, and return the results in order.

    ``next`` and ``close`` are called in one thread, in which torch starts the processes. It must
    not be the main thread, where torch would install a handler of SIGCHLD that raises exceptions at
    any point of a step.

    Attributes:
        function: Function of a task. Its result has the member ``content``, any nesting of tensors.
        tasks: The tasks, in order.
        count: Number of processes.
        description: The dataset in errors.
        timeout_s: Seconds to wait for a result before the worker counts as hanging.
    """

    function: Callable[[_Task], _Result]
    tasks: Iterable[_Task]
    count: int
    description: str
    timeout_s: float
    _results: Iterator[Any] | None = None
    _context: _Context = field(default_factory=_Context)
    _stacks: list[IO[bytes]] = field(default_factory=list)
    _files: ExitStack = field(default_factory=ExitStack)
    _has_killed: bool = False

    def __post_init__(self) -> None:
        """Allocate the shared memory of the processes, which start with the first ``next``."""
        self._progress = ProgressTable(self.count)

    def next(self) -> _Result:
        """Return the result of the next task.

        Raises:
            SampleError: The function failed, or a worker died.
            ConfigError: The function found an error of the user.
        """
        if self._results is None:
            self._results = self._start()
        try:
            result = next(self._results)
        except (RuntimeError, OSError, EOFError) as error:  # a worker died, or its last result did
            if (died := self._death()) is not None:
                raise died from None
            raise SampleError(f"{self.description}: {error}") from error
        if isinstance(result, WorkerFailure):
            result.reraise()
        value: _Result = result[0]
        return value

    def wait(self, result: Future[_Loaded]) -> _Loaded:
        """Return the result of a function that calls ``next`` in the other thread.

        Raises:
            SampleError: No result came within ``timeout_s``. The workers have been killed.
        """
        began = time.monotonic()
        while True:
            try:
                return result.result(timeout=min(_CHECK_S, self.timeout_s / 4))
            except FutureTimeoutError:
                if result.done():
                    raise
                if time.monotonic() - began > self.timeout_s:
                    message, stack = self._hanging()
                    self._kill()
                    raise SampleError(message) from WorkerTracebackError(stack)

    def stop(self) -> bool:
        """Make the workers finish their samples, so that a waiting ``next`` ends.

        Called in any thread. Workers that are not done in a second are killed.

        Returns:
            Whether ``next`` ends at once. torch notices a killed worker after up to 5 seconds.
        """
        self._progress.stop()
        deadline = time.monotonic() + _FINISH_S
        while time.monotonic() < deadline and self._busy():
            time.sleep(0.01)
        if self._busy():
            self._kill()
        return not self._has_killed

    def close(self) -> None:
        """End the processes."""
        self._results = None  # torch ends idle workers
        self._kill()
        for process in self._context.started:
            process.join()
        self._files.close()

    def _busy(self) -> list[int]:
        """Return the workers that read a sample."""
        return [
            worker
            for worker, process in enumerate(self._context.started)
            if self._progress.read(worker).is_busy and process.is_alive()
        ]

    def _start(self) -> Iterator[Any]:
        with ExitStack() as files:
            self._stacks = [
                files.enter_context(tempfile.TemporaryFile()) for _ in range(self.count)
            ]
            self._files = files.pop_all()
        loader = _Loader(
            _Tasks(self.function, self.description),
            batch_size=None,
            sampler=self.tasks,
            num_workers=self.count,
            collate_fn=_identity,
            worker_init_fn=partial(self._initialize, end_with_parent()),
            multiprocessing_context=self._context,
            prefetch_factor=_AHEAD,
            generator=torch.Generator(),  # otherwise torch draws a seed from the global generator
        )
        with warnings.catch_warnings():
            # From Python 3.12: locks that other threads hold stay locked in a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            return iter(loader)

    def _initialize(self, request_death: Callable[[], None], worker: int) -> None:
        """Prepare a worker process, which is a copy of the rank's process."""
        request_death()
        if multiprocessing.parent_process().pid != os.getppid():  # type: ignore[union-attr]
            os._exit(1)
        gc.enable()  # the training loop disables it
        signal.set_wakeup_fd(-1)
        # Ctrl-C and a scheduler's signals reach the whole process group. The rank decides when to
        # stop, and still needs batches until then.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        faulthandler.register(_STACK_SIGNAL, file=self._stacks[worker], all_threads=False)
        record_in(self._progress, worker)

    def _death(self) -> WorkerDiedError | None:
        """Return the error of the first dead worker; None if all are alive.

        A connection to a worker breaks a moment before the worker has an exit status.
        """
        deadline = time.monotonic() + _DYING_S
        started = self._context.started
        while all(p.exitcode is None for p in started) and time.monotonic() < deadline:
            time.sleep(0.01)
        for worker, process in enumerate(started):
            status = process.exitcode
            if status is None:
                continue
            sample = self._progress.read(worker).sample or "its first sample"
            what = f"the process that read {sample} {_end(status)}"
            return WorkerDiedError(f"{self.description}: {what}")
        return None

    def _hanging(self) -> tuple[str, str]:
        """Return the error of the worker that has read a sample for the longest time, its stack."""
        busy = {worker: self._progress.read(worker) for worker in self._busy()}
        if not busy:
            message = f"no batch came from {self.count} processes within {self.timeout_s:g} s"
            return f"{self.description}: {message}, although none of them reads a sample", ""
        worker, record = max(busy.items(), key=lambda item: item[1].seconds)
        if record.seconds < self.timeout_s / 2:  # it reads many samples before the batch
            message = (
                f"{self.description}: no batch came within {self.timeout_s:g} s; now "
                f"{record.sample} is read. Raise launch.timeout_s; if a stream reads all earlier "
                "samples again after a resume, give it a state"
            )
            return message, self._stack(worker)
        message = (
            f"{self.description}: reading {record.sample} has taken {record.seconds:.1f} s, so the "
            "process hangs; if samples take that long, raise launch.timeout_s"
        )
        return message, self._stack(worker)

    def _stack(self, worker: int) -> str:
        """Return the stack of a worker's main thread; the innermost frame comes first."""
        file, process = self._stacks[worker], self._context.started[worker]
        with suppress(ProcessLookupError):
            os.kill(process.pid or 0, _STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_S
        while time.monotonic() < deadline and not os.fstat(file.fileno()).st_size:
            time.sleep(0.05)
        time.sleep(0.05)  # the handler writes line by line
        file.seek(0)
        return file.read().decode(errors="replace") or "The process does not answer."

    def _kill(self) -> None:
        self._has_killed = True
        for process in self._context.started:
            if process.is_alive():
                process.kill()


def _end(status: int) -> str:
    """Return how a process ended, from its exit status."""
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name
    return f"was ended by {name}{_HINTS.get(name, '')}"


def _identity(result: Any) -> Any:
    return result
