"""Converts the index of a checkpoint, which locates each tensor, between JSON and torch's objects.

An index is refused if it names a file that the manifest does not list, or more values than its
files hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from axonlaunch.checkpoint.format.manifest import INDEX, CorruptCheckpointError, Sum
from axonlaunch.checkpoint.torch_internals import StoragePlace

_DTYPES = {
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2"),
}
NO_TENSOR = "is not a tensor; a checkpoint contains only tensors"


def index_to_json(metadata: Metadata) -> bytes:
    """Return the JSON of an index; its offsets are those of raw bytes, after the headers.

    Args:
        metadata: Index of torch; ``storage_data`` locates the header and bytes of each chunk.

    Raises:
        TypeError: A value to save is not a tensor.
    """
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{name} {NO_TENSOR}")
        dtype = entry.properties.dtype
        tensors[name] = {
            "dtype": str(dtype).removeprefix("torch."),
            "size": list(entry.size),
            "chunks": [_chunk_to_json(name, chunk, dtype, metadata) for chunk in entry.chunks],
        }
    return json.dumps({"tensors": tensors}, separators=(",", ":")).encode()


def _chunk_to_json(
    name: str, chunk: ChunkStorageMetadata, dtype: torch.dtype, metadata: Metadata
) -> dict[str, Any]:
    entry = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
    assert not entry.transform_descriptors, "the bytes in the file are not transformed"
    nbytes = math.prod(chunk.sizes) * dtype.itemsize
    return {
        "offsets": list(chunk.offsets),
        "sizes": list(chunk.sizes),
        "file": entry.relative_path,
        "offset": entry.offset + entry.length - nbytes,  # after the header
        "length": nbytes,
    }


def read_index(content: bytes, files: Mapping[str, Sum]) -> Metadata:
    """Return the content of an ``index.json`` as torch's objects.

    Args:
        content: Bytes of the file.
        files: Files of the checkpoint, as its manifest lists them.

    Raises:
        CorruptCheckpointError: The content is not an index, or contradicts ``files``.
    """
    try:
        index = _metadata_of(json.loads(content))
        _refuse_impossible(index, files)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"has an {INDEX} that {error}") from None
    except Exception as error:  # invalid content fails in any way
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        message = f"has an {INDEX} that can't be understood ({reason})"
        raise CorruptCheckpointError(message) from None
    return index


def _metadata_of(content: Any) -> Metadata:
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, StoragePlace] = {}
    for name, entry in content["tensors"].items():
        if entry["dtype"] not in _DTYPES or not name.isprintable():
            raise CorruptCheckpointError(f"gives {name!a} no dtype or name that there is")
        chunks = []
        for chunk in entry["chunks"]:
            offsets, sizes = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            offset, length = _numbers([chunk["offset"], chunk["length"]])
            places[MetadataIndex(name, offsets)] = StoragePlace(chunk["file"], offset, length)
        properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
        tensors[name] = TensorStorageMetadata(properties, _numbers(entry["size"]), chunks)
    return Metadata(tensors, storage_data=places)


def _numbers(values: Any) -> torch.Size:
    if not isinstance(values, list):
        raise TypeError(values)
    for value in values:
        if type(value) is not int or value < 0:
            raise TypeError(value)
    return torch.Size(values)


def _refuse_impossible(index: Metadata, files: Mapping[str, Sum]) -> None:
    """Check an index against the files of its checkpoint.

    Memory for a tensor is allocated before its values are read, so an index that claims more values
    than the files hold must be refused.

    Raises:
        CorruptCheckpointError: The index contradicts the files.
    """
    for stored in index.storage_data.values():
        if stored.relative_path not in files:
            name = stored.relative_path
            raise CorruptCheckpointError(f"names {name}, which the manifest does not list")
    for name, entry in index.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), "the index has only tensors"
        covered = 0
        for chunk in entry.chunks:
            stored = index.storage_data[MetadataIndex(name, chunk.offsets)]
            numel = math.prod(chunk.sizes)
            covered += numel
            if stored.offset + stored.length > files[stored.relative_path].bytes:
                raise CorruptCheckpointError(
                    f"puts {name} beyond the end of {stored.relative_path}"
                )
            if numel * entry.properties.dtype.itemsize > stored.length:
                raise CorruptCheckpointError(f"gives {name} more values than its file holds")
        if covered != math.prod(entry.size):
            raise CorruptCheckpointError(f"lacks parts of {name}")
