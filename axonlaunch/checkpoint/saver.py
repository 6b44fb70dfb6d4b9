"""Saves a run's states while it trains, at once or in the background.

One save is in flight at most; one that fails ends the run, whenever it was begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from axonlaunch.checkpoint import step_folders
from axonlaunch.checkpoint.dcp_writer import Writer
from axonlaunch.checkpoint.manifest import Checkpoint
from axonlaunch.checkpoint.planners import WritesBoxes
from axonlaunch.checkpoint.save_progress import SharedProgress
from axonlaunch.checkpoint.staging import HostCopies
from axonlaunch.checkpoint.step_folders import Retention
from axonlaunch.checkpoint.storage import is_remote
from axonlaunch.comm import Backend, World

_LONGEST_SAVE = timedelta(days=1)
"""What torch waits for the slowest rank's part. ``launch.timeout_s`` is the time without progress,
which whoever follows the ranks looks at; terabytes on a slow disk take longer."""


class SaveError(Exception):
    """A checkpoint could not be written."""


@dataclass(frozen=True)
class Completed:
    """A checkpoint that is on disk.

    Attributes:
        path: Its folder.
        step: Optimizer steps done.
        seconds: From the beginning of its save to the end.
        stalled_s: Of these, how long training stood still.
    """

    path: Path
    step: int
    seconds: float
    stalled_s: float


@dataclass
class _InFlight:
    done: Future[Any]
    path: Path
    step: int
    began: float
    stalled_s: float


class Saver:
    """Writes checkpoints of one run; every rank of the world has one and calls the same.

    Attributes:
        every: Steps between checkpoints, for who calls it.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        world: World,
        retention: Retention,
        every: int = 1,
        layout: str = "",
        background: bool = False,
        wrote: Callable[[], object] = lambda: None,
        warn: Callable[[str], object] = lambda text: None,
        origin: Callable[[], dict[str, Any] | None] = lambda: None,
        first_row_at: int = 0,
    ) -> None:
        """Prepare to save; every rank calls this.

        Args:
            run_dir: The run's folder, on a file system that every rank sees.
            world: Who writes.
            retention: Which checkpoints outlive newer ones.
            every: Steps between checkpoints.
            layout: The run's, in words.
            background: Write while training continues, from a copy in host memory.
            wrote: Called after each tensor that is written while training waits, and now and then
                while other ranks write and this one has written its part.
            warn: Takes a line on the main rank for each checkpoint that can't be deleted.
            origin: Describes what the rows are made of, when a checkpoint is saved.
            first_row_at: Samples that were seen when the run went on from the first row.
        """
        self._origin, self._first_row_at = origin, first_row_at
        if not is_remote(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)  # a save does not create a deleted folder
        self._run_dir = run_dir
        self._world = world
        self._retention = retention
        self.every = every
        self._layout = layout
        self._background = background
        self._copies = HostCopies()
        self._wrote = (lambda: None) if background else wrote
        # Threads of one process are watched as one rank.
        self._shares = world.world_size > 1 and world.backend is not Backend.MOCK
        self._saves = 0
        self._group: dist.ProcessGroup | None = None
        self._in_flight: _InFlight | None = None
        self._pruner = ThreadPoolExecutor(max_workers=1)
        self._pruning: Future[dict[Path, OSError]] | None = None
        self._warn = warn
        self._not_deleted: set[Path] = set()

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        samples: int,
        loss: float | None = None,
        eval_loss: float | None = None,
        tokens: int | None = None,
        best_eval_loss: float | None = None,
        evaluations_since: int = 0,
        data: dict[str, Any] | None = None,
    ) -> list[Completed]:
        """Save a state, as ``Engine.state_dict`` gives it; every rank calls this.

        The other arguments are what the manifest says of it: see ``manifest.Checkpoint``.

        Args:
            state: Nested, of tensors; they may be overwritten once this returns.
            step: Optimizer steps done.
            samples: Samples seen.
            loss: Training loss of the last step.
            eval_loss: Loss of an evaluation at this step; None without one.
            tokens: Targets that counted, of all steps.
            best_eval_loss: Lowest loss of an evaluation.
            evaluations_since: Evaluations after that one.
            data: Where the data is that can only be read in turn.

        Returns:
            What is complete: this checkpoint, or one that was still being written.

        Raises:
            SaveError: This one, or the one before, could not be written.
        """
        before = self.close()
        began = time.perf_counter()
        self._saves += 1
        if self._shares and self._group is None:
            # In the background its messages must not meet those of training, of another thread.
            self._group = dist.new_group(backend="gloo", timeout=_LONGEST_SAVE)
        about = Checkpoint(
            step_folders.path_of(self._run_dir, step=step),
            step=step,
            samples=samples,
            world_size=self._world.world_size,
            loss=loss,
            eval_loss=eval_loss,
            layout=self._layout,
            saved_at=time.time(),
            tokens=tokens,
            best_eval_loss=best_eval_loss,
            evaluations_since=evaluations_since,
            data=data,
            origin=self._origin(),
            first_row_at=self._first_row_at,
        )
        done = self._begin(about, state)
        stalled = time.perf_counter() - began
        self._in_flight = _InFlight(done, about.path, step, began, stalled)
        return before + self.take_completed(wait=not self._background)

    def _begin(self, about: Checkpoint, state: dict[str, Any]) -> Future[Any]:
        """Write in the background, or until it is done or has failed."""
        planner = WritesBoxes()
        if self._background:
            begun = dcp.async_save(
                state,
                storage_writer=self._writer(about, wrote=self._wrote),
                planner=planner,
                process_group=self._group,
            )
            assert isinstance(begun, Future)
            return begun
        done: Future[Any] = Future()
        with self._shared_progress() as wrote:
            writer = self._writer(about, wrote=wrote)
            try:
                dcp.save(state, storage_writer=writer, planner=planner, process_group=self._group)
                done.set_result(None)
            except (CheckpointException, OSError) as error:
                done.set_exception(error)
        return done

    def _writer(self, about: Checkpoint, *, wrote: Callable[[], object]) -> Writer:
        return Writer(
            about,
            done=self._prune,
            wrote=wrote,
            background=self._background,
            copies=self._copies,
            creates_parents=False,
        )

    @contextmanager
    def _shared_progress(self) -> Iterator[Callable[[], object]]:
        """Yield what is called after each piece that this rank writes."""
        store = self._world.store if self._shares else None
        if store is None:
            yield self._wrote
            return
        key = f"axonlaunch/save/{self._saves}"
        with SharedProgress(store, key, moved=self._wrote) as progress:

            def wrote() -> None:
                self._wrote()
                progress.wrote()

            yield wrote

    def _prune(self) -> None:
        """Delete what is not kept; that takes a while for gigabytes, and nobody waits for it."""
        self._pruning = self._pruner.submit(step_folders.prune, self._run_dir, self._retention)

    def take_completed(self, *, wait: bool = False) -> list[Completed]:
        """Return the checkpoint that was written since, if one was.

        Args:
            wait: Until what is being written is complete.

        Raises:
            SaveError: It could not be written.
        """
        save = self._in_flight
        if save is None or not (wait or save.done.done()):
            return []
        self._in_flight = None
        try:
            save.done.result()
        except (CheckpointException, OSError) as error:
            raise SaveError(f"{save.path} could not be written: {_reason(error)}") from error
        return [Completed(save.path, save.step, time.perf_counter() - save.began, save.stalled_s)]

    def close(self) -> list[Completed]:
        """Wait until nothing is written or deleted any more; return what is complete.

        Raises:
            SaveError: It could not be written.
        """
        completed = self.take_completed(wait=True)
        self._warn_of_not_deleted()
        return completed

    def _warn_of_not_deleted(self) -> None:
        """Wait until nothing is deleted any more; say once what could not be.

        It ends no run: a run that saves has what it needs, and a disk that fills by it says so.
        """
        if self._pruning is None:
            return
        try:
            left = self._pruning.result()
        except OSError as error:
            left = {self._run_dir: error}
        self._pruning = None
        for path in left.keys() - self._not_deleted:
            self._warn(f"{path} is not kept and could not be deleted: {_reason(left[path])}")
        self._not_deleted |= left.keys()


def _reason(error: BaseException) -> str:
    """Say what went wrong on the first rank that something went wrong on."""
    if isinstance(error, CheckpointException):
        [(rank, (cause, _)), *_] = error.failures.items()
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"
