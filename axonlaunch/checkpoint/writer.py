"""Torch's writer of checkpoints, with a checksum of each file and an end that all ranks reached.

It writes what it is given, once there is room, and makes a checkpoint of it; when, is the saver's.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import zlib
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import futures
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import WriteResult

from axonlaunch.checkpoint.folders import Checkpoint, Sum, complete, partial_of, prepare
from axonlaunch.checkpoint.source import FileSystem as Remote
from axonlaunch.checkpoint.storage import is_remote

_SYNC_EVERY = 32 << 20
_LOWEST = 19


class Writer(FileSystemWriter):
    """Writes a rank's part of a checkpoint; every file is stored before it counts as written."""

    def __init__(
        self,
        about: Checkpoint,
        *,
        done: Callable[[], object] = lambda: None,
        background: bool = False,
    ) -> None:
        """Remember what is to be written.

        Args:
            about: The checkpoint that is to be.
            done: Called on the main rank once it is complete.
            background: A thread writes that has nothing else to do, while others train.
        """
        folder = partial_of(about.path)
        where = str(folder)
        super().__init__(where, sync_files=False)  # ours syncs what torch leaves in its buffer
        self._summing: _Summing | _SummingRemote
        self._summing = _SummingRemote() if is_remote(folder) else _Summing()
        self.fs = cast("FileSystem", self._summing)
        self.path = self.fs.init_path(where)
        self._about = about
        self._done = done
        self._background = background

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state to host memory, once; torch's own copies what is there already three times.

        Args:
            state_dict: Nested, of tensors.
        """
        return {
            name: self.stage(value) if isinstance(value, dict) else _on_host(value)
            for name, value in state_dict.items()
        }

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the disk alone: the main rank may still be clearing what an old save has left."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder, on the main rank; no other writes before it has.

        Raises:
            OSError: There is no room.
        """
        prepare(self._about.path)
        self.fs.mkdir(self.path)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> futures.Future[list[WriteResult]]:
        """Write; what was written goes to the main rank, with the sums."""
        if self._background:
            _step_back()
        computing = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # of each tensor: a file's own is enough
        try:
            results = _Written(super().write_data(plan, planner).wait())
        finally:
            torch.serialization.set_crc32_options(computing)
        results.sums = dict(self._summing.sums)
        told: futures.Future[list[WriteResult]] = futures.Future()
        told.set_result(results)
        return told

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, on the main rank, and make a checkpoint of what is there."""
        super().finish(metadata, results)
        found = dict(self._summing.sums)
        for of_rank in results:
            found.update(cast("_Written", of_rank).sums)
        complete(partial_of(self._about.path), self._about, found)
        self._done()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _step_back() -> None:
    """Let training go first on cores that both want; on Linux threads have priorities."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)


class _Written(list[WriteResult]):
    """What a rank wrote, which torch sends to the main one."""

    sums: dict[str, Sum]


class _Summing(FileSystem):
    """Files of this machine, each summed while it is written, and synced."""

    def __init__(self) -> None:
        self.sums: dict[str, Sum] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _SummedFile(path) as file:
            yield file
        self.sums[_name(path)] = file.sum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[_name(new_path)] = self.sums.pop(_name(path))


class _SummingRemote(Remote):
    """Files of a remote place, each summed while it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Sum] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            summed = _SummedStream(stream)
            yield summed
        self.sums[_name(path)] = summed.sum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[_name(new_path)] = self.sums.pop(_name(path))


class _SummedStream(io.RawIOBase):
    """A stream that counts and sums what goes through it."""

    def __init__(self, stream: io.IOBase) -> None:
        self.sum = Sum(0, 0)
        self._stream: Any = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.sum = _added(self.sum, view)
        self._stream.write(view)
        return len(view)

    def tell(self) -> int:
        return self.sum.bytes


def _added(known: Sum, view: memoryview) -> Sum:
    return Sum(known.bytes + len(view), zlib.crc32(view, known.crc32 or 0))


def _name(path: str | os.PathLike[str]) -> str:
    return os.fspath(path).rpartition("/")[2]


class _SummedFile(io.BufferedWriter):
    """A file that counts and sums what is written, and is on disk when it is closed.

    The disk works while more is written: the kernel alone would begin only when it is asked to
    sync, or when a tenth of the memory waits.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.sum = Sum(0, 0)
        self._disk = ThreadPoolExecutor(max_workers=1)
        self._syncing: Future[None] | None = None
        self._synced = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.sum = _added(self.sum, view)
        written = super().write(view)
        idle = self._syncing is None or self._syncing.done()
        if idle and self.sum.bytes - self._synced > _SYNC_EVERY:
            self._synced = self.sum.bytes
            self._syncing = self._disk.submit(os.fdatasync, self.fileno())
        return written

    def close(self) -> None:
        if not self.closed:
            self._disk.shutdown()
            self.flush()
            os.fsync(self.fileno())
        super().close()
