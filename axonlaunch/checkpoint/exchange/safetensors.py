"""Reads safetensors on every rank in part, and writes them in one process, file by file.

A folder of weights holds ``*.safetensors``: a ``model=hf`` in Hugging Face's names, any other model
in its own. Nothing here is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from axonlaunch.checkpoint.format.manifest import is_name
from axonlaunch.checkpoint.loading.reader import MODEL
from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.models.source_of import source_of
from axonlaunch.models.tensors.packed_blocks import BlockFormat, library_problem
from axonlaunch.models.tensors.stored_blocks import NF4, StoredBlocks, parts_of, stored_blocks
from axonlaunch.models.tensors.tensor_origins import OriginTensor
from axonlaunch.system.storage.files import inside_folder, open_regular, read_text

INDEX_FILE = "model.safetensors.index.json"
WHOLE = "model.safetensors"
CONFIG_FILE = "config.json"
_LARGEST_JSON = 64 << 20

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


class Reader(StorageReader):
    """Storage reader of torch for any region of any parameter in a folder of safetensors.

    Matrices that bitsandbytes quantized to NF4 are read as fp32 values or unchanged.

    Attributes:
        blocks: Quantized matrices in the files by name.
        packed: Quantized matrices by name of their parameter, if that is read unchanged.
    """

    def __init__(
        self, folder: Path, model: Any, *, packed: Mapping[str, BlockFormat] | None = None
    ) -> None:
        """Read the names, shapes and dtypes in a folder.

        Args:
            folder: Folder of the weights.
            model: Typed configuration of the model to fill, or of its run.
            packed: Formats of quantized parameters by name. Matrices that are saved in the same
                format have its shape and codes.

        Raises:
            ConfigError: The folder has no weights, or a file is corrupt.
        """
        self._shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._files: dict[str, Path] = {}
        for file in _files(folder):
            with open_safetensors(file) as content:
                for name in content.offset_keys():
                    entry = content.get_slice(name)
                    dtype = _DTYPES.get(entry.get_dtype(), torch.uint8)
                    self._shapes[name] = tuple(entry.get_shape()), dtype
                    self._files[name] = file
        self.blocks = self._find_blocks(folder)
        sizes = {name: shape for name, (shape, _) in self._shapes.items()}
        saved = source_of(model).find_saved(sizes)
        self._parameters, self._unused = saved.parameters, saved.unexpected
        self.packed = {
            name: self.blocks[source]
            for name, stored in (packed or {}).items()
            if stored is NF4 and (source := self._only_source(name)) in self.blocks
        }

    def _find_blocks(self, folder: Path) -> dict[str, StoredBlocks]:
        """Find quantized matrices, and replace the shapes of their parts with that of the values.

        Raises:
            ConfigError: A matrix can't be read, or bitsandbytes is missing.
        """

        def read(name: str) -> Tensor:
            with open_safetensors(self._files[name]) as content:
                tensor: Tensor = content.get_tensor(name)
            return tensor

        sizes = {name: shape for name, (shape, _) in self._shapes.items()}
        try:
            blocks = stored_blocks(sizes, read)
            if blocks and (problem := library_problem()):
                raise ValueError(f"its weights are quantized (bitsandbytes nf4): {problem}")
        except ValueError as error:
            raise ConfigError([ConfigIssue("", f"{folder}: {error}")]) from None
        for name, matrix in blocks.items():
            self._shapes[name] = matrix.shape, torch.float32
            for part in parts_of(name):
                self._shapes.pop(part, None)
        return blocks

    def _only_source(self, parameter: str) -> str | None:
        """Return the name of the tensor that equals a parameter; None if no single one does."""
        laid = self._parameters.get(parameter)
        if not isinstance(laid, OriginTensor) or len(laid.sources) != 1:
            return None
        [source] = laid.sources
        return source if laid == OriginTensor.full(source, self._shapes[source][0]) else None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by the model's parameter names.

        Tensors that are not of the model are included under their names in the files.
        """
        by_name = {ours: tuple(laid.shape) for ours, laid in self._parameters.items()}
        by_name |= {ours: matrix.packed_shape for ours, matrix in self.packed.items()}
        return by_name | {name: self._shapes[name][0] for name in sorted(self._unused)}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: there is no state to reset."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return metadata with one chunk per parameter."""
        entries: dict[str, Any] = {}
        for ours, laid in self._parameters.items():
            size, dtype = torch.Size(laid.shape), self._shapes[laid.sources[0]][1]
            if (matrix := self.packed.get(ours)) is not None:
                size, dtype = torch.Size(matrix.packed_shape), torch.uint8
            entries[MODEL + ours] = TensorStorageMetadata(
                TensorProperties(dtype=dtype),
                size,
                [ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
            )
        return Metadata(entries)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Do nothing: the folder was read by the constructor."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan of this rank unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the regions in this rank's plan."""
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}

            def read_saved(name: str, region: tuple[slice, ...]) -> Tensor:
                file = self._files[name]
                if file not in opened:
                    opened[file] = stack.enter_context(open_safetensors(file))
                part: Tensor = (
                    opened[file].get_slice(name)[region]
                    if region
                    else opened[file].get_tensor(name)
                )
                return part

            def read(name: str, region: tuple[slice, ...]) -> Tensor:
                matrix = self.blocks.get(name)
                return (
                    read_saved(name, region)
                    if matrix is None
                    else matrix.values(read_saved, region)
                )

            for item in plan.items:
                name = item.storage_index.fqn.removeprefix(MODEL)
                target = planner.resolve_tensor(item).detach()
                region = item.storage_offsets, item.lengths
                if (matrix := self.packed.get(name)) is not None:
                    matrix.read_packed(read_saved, *region, target)
                else:
                    self._parameters[name].read(read, *region, target)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        """Return False: torch can't create this reader from a path."""
        return False


def write_safetensors(
    folder: Path,
    model: Any,
    tensors: Iterator[tuple[str, Tensor]],
    *,
    dtype: torch.dtype | None,
    file_bytes: int,
) -> list[str]:
    """Write parameters as safetensors, with an index if there are several files.

    Args:
        folder: New or empty folder.
        model: Typed configuration of the model.
        tensors: Parameter names and full tensors, in the order of the model.
        dtype: Dtype for floating-point tensors; None keeps theirs.
        file_bytes: Maximum size of a file, except for a larger tensor.

    Returns:
        Names of the written files.
    """
    batch: dict[str, Tensor] = {}
    written: dict[Path, list[str]] = {}
    shard_bytes = total = 0

    def flush() -> None:
        path = folder / f"part-{len(written)}.safetensors"
        save_file(batch, path, metadata={"format": "pt"})
        written[path] = [*batch]

    for name, tensor in source_of(model).as_saved(tensors):
        cast = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        if shard_bytes and shard_bytes + cast.nbytes > file_bytes:
            flush()
            batch, shard_bytes = {}, 0
        batch[name] = cast.contiguous()
        shard_bytes, total = shard_bytes + cast.nbytes, total + cast.nbytes
    flush()
    files = _rename_files(folder, [*written])
    if len(files) > 1:
        pairs = zip(files, written.values(), strict=True)
        index = {name: file for file, names in pairs for name in names}
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / INDEX_FILE).write_text(json.dumps(content, indent=1) + "\n")
    return files


def _rename_files(folder: Path, written: Sequence[Path]) -> list[str]:
    """Rename files to Hugging Face's names, which contain the number of files."""
    count = len(written)
    names = [WHOLE]
    if count > 1:
        names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    for path, name in zip(written, names, strict=True):
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors creates files only for the owner
        path.rename(folder / name)
    return names


def _files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: those in its index, or all without an index.

    Raises:
        ConfigError: The folder has no weights, or the index names files outside the folder.
    """
    index = folder / INDEX_FILE
    if not os.path.lexists(index):
        files = [folder / WHOLE] if (folder / WHOLE).exists() else []
        files = files or sorted(folder.glob("*.safetensors"))
        if not files:
            raise ConfigError(
                [ConfigIssue("", f"{folder}: contains no *.safetensors and no checkpoint")]
            )
        return files
    values = read_json(index, "weight_map").values()
    if wrong := [name for name in values if not is_name(name)]:
        message = f"{index}: names {wrong[0]!r}, which is not a file name"
        raise ConfigError([ConfigIssue("", message)])
    names = set(values)
    if missing := [name for name in names if not os.path.lexists(folder / name)]:
        listed = ", ".join(sorted(missing))
        message = f"{index}: names {listed}, which its folder lacks; copy the missing files"
        raise ConfigError([ConfigIssue("", message)])
    return [folder / name for name in sorted(names)]


def read_json(file: Path, key: str | None = None) -> dict[str, Any]:
    """Read a JSON object from a file, or the object at one of its keys.

    Raises:
        ConfigError: The file can't be read, or the value is not an object.
    """
    try:
        content = json.loads(read_text(inside_folder(file), at_most=_LARGEST_JSON))
        content = content if key is None else content[key]
        if not isinstance(content, dict):
            raise TypeError(f"it holds {type(content).__name__} where keys belong")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = (
            error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        )
        raise ConfigError([ConfigIssue("", f"{file}: can't be read: {reason}")]) from None
    return content


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """Open a regular safetensors file.

    Raises:
        ConfigError: The file is not regular, or corrupt.
    """
    try:
        with open_regular(inside_folder(file)) as stream:
            # Opened by its descriptor, so that the checked file is the one that is read.
            content = safe_open(f"/dev/fd/{stream.fileno()}", framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        if isinstance(error, SafetensorError):
            reason = f"{reason}; if it was cut off, copy or fetch it again"
        raise ConfigError([ConfigIssue("", f"{file}: can't be read: {reason}")]) from None
    with content:
        yield content
