"""Writes checkpoints for torch.distributed.checkpoint, with a checksum of each file.

A checkpoint becomes visible only after all ranks have written their parts.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, futures
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    FileSystem,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from zlib_ng.zlib_ng import crc32

from axonlaunch.checkpoint.format.index import NO_TENSOR, index_to_json
from axonlaunch.checkpoint.format.manifest import INDEX, TORCH_INDEX, Checkpoint, Sum
from axonlaunch.checkpoint.format.step_folders import complete, partial_of, prepare
from axonlaunch.checkpoint.format.storage import is_remote
from axonlaunch.checkpoint.format.torch_archive import archive_header
from axonlaunch.checkpoint.loading.dcp_reader import bytes_of
from axonlaunch.checkpoint.saving.direct_io import DirectFile
from axonlaunch.checkpoint.saving.staging import HostCopies
from axonlaunch.checkpoint.torch_internals import (
    OverlappingCpuLoader,
    RemoteFileSystem,
    SerialCpuLoader,
    StoragePlace,
    TensorLoader,
)

_LOWEST = 19
_SMALL = 1 << 16
"""Bytes below which copying a tensor costs less than another write."""


class Writer(FileSystemWriter):
    """Writes one rank's part of a checkpoint; files are on disk before the save completes."""

    def __init__(
        self,
        target: Checkpoint,
        *,
        done: Callable[[], object] = lambda: None,
        wrote: Callable[[], object] = lambda: None,
        background: bool = False,
        copies: HostCopies | None = None,
        creates_parents: bool = True,
    ) -> None:
        """Initialize the writer without touching the disk.

        Args:
            target: Checkpoint to create.
            done: Callback on the main rank after the checkpoint is complete.
            wrote: Callback after each written piece.
            background: Whether a separate thread writes while training continues.
            copies: Host copies of the state; None creates new ones.
            creates_parents: Whether to create a missing run folder; otherwise it is an error.
        """
        folder = partial_of(target.path)
        super().__init__(str(folder), sync_files=False)  # files are on disk once closed
        self._summing = _SummingRemote() if is_remote(folder) else _SummingLocal()
        self._summing.sums, self._summing.wrote = {}, wrote
        self._summing.creates_parents = creates_parents
        self.fs = cast("FileSystem", self._summing)
        self.path = self.fs.init_path(str(folder))
        self._target = target
        self._done = done
        self._background = background
        self._copies = copies or HostCopies()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state to host memory once; torch copies host tensors three times.

        Args:
            state_dict: Nested dictionary of tensors.
        """
        return self._copies.copy(state_dict)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan without touching the disk, which the main rank may still be clearing."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder on the main rank; other ranks write only after this.

        Raises:
            OSError: The disk lacks free space.
        """
        prepare(self._target.path)
        self.fs.mkdir(self.path)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> futures.Future[list[WriteResult]]:
        """Write tensors in order, each as a header of torch and its bytes.

        Raises:
            TypeError: A value to save is not a tensor.
        """
        if self._background:
            _step_back()
        results = _Written()
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            for tensor, item in self._on_host(plan.items, planner):
                start = stream.tell()
                _write_tensor(stream, tensor)
                stored_at = StoragePlace(name, start, stream.tell() - start)
                results.append(WriteResult(item.index, tensor.nbytes, stored_at))
        results.sums = dict(self._summing.sums)
        future: futures.Future[list[WriteResult]] = futures.Future()
        future.set_result(results)
        return future

    def _on_host(
        self, items: list[WriteItem], planner: SavePlanner
    ) -> Iterator[tuple[Tensor, WriteItem]]:
        """Yield host tensors to write; GPU tensors are copied ahead while others are written."""
        resolve = planner.resolve_data
        loader: TensorLoader = SerialCpuLoader(resolve)
        if torch.cuda.is_available():
            copy_ahead = self.per_thread_copy_ahead
            loader = OverlappingCpuLoader(resolve, inflight_threshhold=copy_ahead)
        for item in items:
            if item.tensor_data is None:
                raise TypeError(f"{item.index.fqn} {NO_TENSOR}")
            loader.add(math.prod(item.tensor_data.chunk.sizes), item)
        loader.start_loading()
        yield from cast("Iterator[tuple[Tensor, WriteItem]]", loader.values())

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write both indices and complete the checkpoint; called on the main rank."""
        metadata.storage_data = {
            result.index: result.storage_data for rank in results for result in rank
        }
        metadata.version = CURRENT_DCP_VERSION
        indices = {INDEX: index_to_json(metadata), TORCH_INDEX: _pickle_index(metadata)}
        for name, content in indices.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
                stream.write(content)
        sums = dict(self._summing.sums)
        for rank_results in results:
            sums.update(cast("_Written", rank_results).sums)
        complete(partial_of(self._target.path), self._target, sums)
        self._done()


def _write_tensor(stream: io.IOBase, tensor: Tensor) -> None:
    """Write torch's header and the bytes of a tensor; a small tensor is one write."""
    header = archive_header(tensor.dtype, tensor.shape)
    content = bytes_of(tensor.contiguous()) if tensor.nbytes else np.empty(0, np.uint8)
    if tensor.nbytes < _SMALL:
        stream.write(header + content.tobytes())
        return
    stream.write(header)
    stream.write(content)


def _pickle_index(metadata: Metadata) -> bytes:
    """Return the pickle of torch's index; equal properties become one object, pickled once."""
    shared: dict[tuple[Any, ...], Any] = {}
    for entry in metadata.state_dict_metadata.values():
        properties = cast("TensorStorageMetadata", entry).properties
        key = tuple(vars(properties).values())
        cast("TensorStorageMetadata", entry).properties = shared.setdefault(key, properties)
    return pickle.dumps(metadata)


def _step_back() -> None:
    """Lower this thread's priority so that training gets the CPU first (Linux only)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)


class _Written(list[WriteResult]):
    """Write results of one rank with its checksums; torch sends them to the main rank."""

    sums: dict[str, Sum]


class _Local(FileSystem):
    """File system of this node."""

    creates_parents: bool

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        if mode == "wb":
            with DirectFile(path) as file:
                yield file
            return
        with super().create_stream(path, mode) as stream:
            yield stream

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        folder = Path(path)
        folder.parent.mkdir(parents=self.creates_parents, exist_ok=True)
        folder.mkdir()  # a link that leads elsewhere is an error


class _Sums:
    """Mixin that computes checksums while files are written; comes before the file system."""

    sums: dict[str, Sum]
    wrote: Callable[[], object]

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        files = cast("FileSystem", super())
        with files.create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            summed = _SummedStream(stream, wrote=self.wrote)
            yield summed
        self.sums[os.fspath(path).rpartition("/")[2]] = summed.sum


class _SummingLocal(_Sums, _Local):
    """File system of this node, with checksums."""


class _SummingRemote(_Sums, RemoteFileSystem):
    """Remote file system, with checksums."""

    creates_parents: bool


class _SummedStream(io.RawIOBase):
    """Stream that counts bytes and computes their CRC-32."""

    def __init__(self, stream: io.IOBase, *, wrote: Callable[[], object]) -> None:
        self.sum = Sum(0, 0)
        self._stream: Any = stream
        self._wrote = wrote

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.sum = _add_to_sum(self.sum, view)
        self._stream.write(view)
        self._wrote()
        return len(view)

    def tell(self) -> int:
        return self.sum.bytes


def _add_to_sum(total: Sum, view: memoryview) -> Sum:
    return Sum(total.bytes + len(view), crc32(view, total.crc32))
