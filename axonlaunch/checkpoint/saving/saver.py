"""Saves a run's state during training, synchronously or in the background.

At most one save is in progress. A failed save ends the run, also if it began earlier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from axonlaunch.checkpoint.format import step_folders
from axonlaunch.checkpoint.format.manifest import Checkpoint
from axonlaunch.checkpoint.format.step_folders import Retention
from axonlaunch.checkpoint.format.storage import is_remote
from axonlaunch.checkpoint.loading.planners import WritesBoxes
from axonlaunch.checkpoint.saving.dcp_writer import Writer
from axonlaunch.checkpoint.saving.save_progress import SharedProgress
from axonlaunch.checkpoint.saving.staging import HostCopies
from axonlaunch.comm import Backend, World

_LONGEST_SAVE = timedelta(days=1)
"""Timeout of torch's collectives in a save. Writing terabytes to a slow disk takes long; a save
without progress is ended by ``launch.timeout_s``, which the launcher watches."""


class SaveError(Exception):
    """A checkpoint could not be written."""


@dataclass(frozen=True)
class Completed:
    """A checkpoint that is on disk.

    Attributes:
        path: Folder of the checkpoint.
        step: Number of completed optimizer steps.
        seconds: Duration of the save.
        stalled_s: Time in which training waited.
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
    """Writes the checkpoints of a run; all ranks make the same calls."""

    def __init__(
        self,
        run_dir: Path,
        *,
        world: World,
        retention: Retention,
        layout: str = "",
        background: bool = False,
        wrote: Callable[[], object] = lambda: None,
        warn: Callable[[str], object] = lambda text: None,
        origin: Callable[[], dict[str, Any] | None] = lambda: None,
        first_row_at: int = 0,
    ) -> None:
        """Initialize the saver; a collective call.

        Args:
            run_dir: Folder of the run, on a file system shared by all ranks.
            world: World of the ranks that write.
            retention: Rule for keeping older checkpoints.
            layout: Layout of the run in words.
            background: Whether to write during training, from a copy in host memory.
            wrote: Callback after each written piece while training waits. It is also called while
                this rank waits for others that write.
            warn: Callback on the main rank with one line per checkpoint that can't be deleted.
            origin: Returns the description of the source of the rows at the time of a save.
            first_row_at: Samples seen when the run last restarted at the first row of its data.
        """
        self._origin, self._first_row_at = origin, first_row_at
        if not is_remote(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)  # a save does not create a deleted folder
        self._run_dir = run_dir
        self._world = world
        self._retention = retention
        self._layout = layout
        self._background = background
        self._copies = HostCopies()
        self._wrote = (lambda: None) if background else wrote
        # Mock ranks are threads of one process, which the launcher watches as one rank.
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
        metrics: Mapping[str, float] | None = None,
        tokens: int | None = None,
        best_metric: str = "loss",
        best_value: float | None = None,
        evaluations_since: int = 0,
        data: dict[str, Any] | None = None,
    ) -> list[Completed]:
        """Save a state from ``Engine.state_dict``; a collective call.

        The other arguments are stored in the manifest; see ``manifest.Checkpoint``.

        Args:
            state: Nested dictionary of tensors, which may be overwritten after the call.
            step: Number of completed optimizer steps.
            samples: Number of samples seen.
            loss: Training loss of the last step.
            eval_loss: Loss of the evaluation at this step; None without an evaluation.
            metrics: Metrics of the evaluation at this step.
            tokens: Number of counted targets over all steps.
            best_metric: Name of the metric, or loss, by which evaluations are compared.
            best_value: Best value of it.
            evaluations_since: Number of evaluations after the best one.
            data: Position in data that can only be read in order.

        Returns:
            Completed checkpoints: this one, or an earlier one that was still in progress.

        Raises:
            SaveError: This or the previous checkpoint could not be written.
        """
        completed = self.close()
        began = time.perf_counter()
        self._saves += 1
        if self._shares and self._group is None:
            # In the background its messages must not meet those of training, of another thread.
            self._group = dist.new_group(backend="gloo", timeout=_LONGEST_SAVE)
        target = Checkpoint(
            step_folders.path_of(self._run_dir, step=step),
            step=step,
            samples=samples,
            world_size=self._world.world_size,
            loss=loss,
            eval_loss=eval_loss,
            layout=self._layout,
            saved_at=time.time(),
            tokens=tokens,
            metrics=dict(metrics or {}),
            best_metric=best_metric,
            best_value=best_value,
            evaluations_since=evaluations_since,
            data=data,
            origin=self._origin(),
            first_row_at=self._first_row_at,
        )
        done = self._begin(target, state)
        stalled = time.perf_counter() - began
        self._in_flight = _InFlight(done, target.path, step, began, stalled)
        return completed + self.take_completed(wait=not self._background)

    def _begin(self, target: Checkpoint, state: dict[str, Any]) -> Future[Any]:
        """Start a save in the background, or write synchronously and return a done future."""
        planner = WritesBoxes()
        if self._background:
            saving = dcp.async_save(
                state,
                storage_writer=self._writer(target, wrote=self._wrote),
                planner=planner,
                process_group=self._group,
            )
            assert isinstance(saving, Future)
            return saving
        done: Future[Any] = Future()
        with self._shared_progress() as wrote:
            writer = self._writer(target, wrote=wrote)
            try:
                dcp.save(state, storage_writer=writer, planner=planner, process_group=self._group)
                done.set_result(None)
            except (CheckpointException, OSError) as error:
                done.set_exception(error)
        return done

    def _writer(self, target: Checkpoint, *, wrote: Callable[[], object]) -> Writer:
        return Writer(
            target,
            done=self._prune,
            wrote=wrote,
            background=self._background,
            copies=self._copies,
            creates_parents=False,
        )

    @contextmanager
    def _shared_progress(self) -> Iterator[Callable[[], object]]:
        """Yield the callback for each piece that this rank writes."""
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
        """Delete checkpoints that are not kept, in the background, because gigabytes take long."""
        self._pruning = self._pruner.submit(step_folders.prune, self._run_dir, self._retention)

    def take_completed(self, *, wait: bool = False) -> list[Completed]:
        """Return the checkpoint that was completed since the last call, if any.

        Args:
            wait: Whether to wait for a save in progress.

        Raises:
            SaveError: The checkpoint could not be written.
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
        """Wait for writing and deleting to finish; return the completed checkpoint, if any.

        Raises:
            SaveError: The checkpoint could not be written.
        """
        completed = self.take_completed(wait=True)
        self._warn_of_not_deleted()
        return completed

    def _warn_of_not_deleted(self) -> None:
        """Wait for deleting to finish, and warn once of each checkpoint that is left.

        A failed deletion does not end the run; a disk that becomes full makes a save fail.
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
    """Return why a save failed on the first rank that failed."""
    if isinstance(error, CheckpointException):
        [(rank, (cause, _)), *_] = error.failures.items()
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"
