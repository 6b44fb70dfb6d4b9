"""Torch's writer of checkpoints, with a checksum of each file and an end that all ranks reached.

It writes what it is given; when, and what becomes of it, is the saver's.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import zlib
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import futures
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import WriteResult

from axonlaunch.checkpoint.folders import Sum
from axonlaunch.checkpoint.source import FileSystem as Remote
from axonlaunch.checkpoint.storage import is_remote

_SYNC_EVERY = 32 << 20
_LOWEST = 19
Done = Callable[[Mapping[str, Sum]], None]


class Writer(FileSystemWriter):
    """Writes a rank's part of a checkpoint; every file is stored before it counts as written."""

    def __init__(self, folder: Path, *, done: Done, background: bool = False) -> None:
        """Prepare to write.

        Args:
            folder: Of the checkpoint that is to be.
            done: Called on the main rank once every rank has written: name of each file -> sum.
            background: A thread writes that has nothing else to do, while others train.
        """
        where = str(folder)
        super().__init__(where, sync_files=False)  # ours syncs what torch leaves in its buffer
        self._summing: _Summing | _SummingRemote
        self._summing = _SummingRemote() if is_remote(folder) else _Summing()
        self.fs = cast("FileSystem", self._summing)
        self.path = self.fs.init_path(where)
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
        """Write the index, on the main rank, and tell that all is there."""
        super().finish(metadata, results)
        found = dict(self._summing.sums)
        for of_rank in results:
            found.update(cast("_Written", of_rank).sums)
        self._done(found)


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
