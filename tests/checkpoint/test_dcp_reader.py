"""A checkpoint holds tensors alone, of every usual dtype; nothing else of it is unpickled."""

from __future__ import annotations

import enum
import io
import os
import pickle
from pathlib import Path
from typing import Any

import old_checkpoint
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import Shard, distribute_tensor

from axonlaunch.checkpoint import (
    Checkpoint,
    CorruptCheckpointError,
    dcp_reader,
    index,
    load_checkpoint,
    manifest,
    reader,
    step_folders,
)
from axonlaunch.checkpoint.dcp_writer import Writer
from axonlaunch.comm import World


class Malicious:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def saved(run_dir: Path, state: dict[str, Any]) -> Checkpoint:
    about = Checkpoint(step_folders.path_of(run_dir, step=1), 1, 1, 1, None)
    with reader.in_one_process():
        dcp.save(state, storage_writer=Writer(about), no_dist=True)
    return about


def test_a_value_that_is_no_tensor_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(
        dcp.api.CheckpointException, match=r"model\.w is not a tensor; a checkpoint "
    ):
        saved(tmp_path, {"model": {"w": "text"}})
    assert step_folders.latest(tmp_path) is None


def test_a_value_of_an_old_one_that_is_no_tensor_is_not_unpickled(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    saved_checkpoint = old_checkpoint.save(tmp_path, {"model": {"w": Malicious(f"touch {victim}")}})
    victim.unlink(missing_ok=True)
    with pytest.raises(
        CorruptCheckpointError, match=r"model\.w is not a tensor, and is not unpickled"
    ):
        reader.read_whole_tensors(saved_checkpoint, {"model": {"w": torch.zeros(2)}})
    assert not victim.exists()


@pytest.mark.parametrize("form", [2, 3])
def test_what_older_formats_hold_is_read(form: int, tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(3, 4).t(), "scalar": torch.tensor(2.0)}}
    saved_checkpoint = old_checkpoint.save(tmp_path, state, form=form)
    read = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
    reader.refuse_damage(saved_checkpoint)
    reader.read_whole_tensors(saved_checkpoint, read)
    assert all(torch.equal(read["model"][name], state["model"][name]) for name in read["model"])


@pytest.mark.parametrize(
    "wanted",
    [torch.zeros(6, 4), torch.zeros(4, 6).t(), torch.zeros(6, 4, dtype=torch.bfloat16)],
    ids=["as it was saved", "transposed in memory", "of another dtype"],
)
def test_a_tensor_is_read_into_whatever_has_its_shape(wanted: Tensor, tmp_path: Path) -> None:
    tensor = torch.arange(48.0).view(4, 12).t()[::2]  # neither contiguous nor all of its storage
    target = saved(tmp_path, {"model": {"before": torch.ones(3, dtype=torch.int8), "w": tensor}})
    reader.read_whole_tensors(target, {"model": {"w": wanted}})
    assert torch.equal(wanted.float(), tensor)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_of_a_tensor_is_read_without_the_rest(dim: int, tmp_path: Path) -> None:
    tensor = torch.arange(24.0).view(6, 4)
    saved_checkpoint = saved(tmp_path, {"model": {"w": tensor}})

    def read(world: World) -> Tensor:
        mesh = init_device_mesh("cpu", (world.world_size,))
        part = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(dim)])
        load_checkpoint(saved_checkpoint, {"model": {"w": part}}, world=world)
        return part.to_local()

    assert torch.equal(torch.cat(World.mock(2).run(read), dim), tensor)


def test_a_file_that_ends_before_a_tensor_does_is_refused(tmp_path: Path) -> None:
    saved_checkpoint = saved(tmp_path, {"model": {"w": torch.ones(64)}})
    file = saved_checkpoint.path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match="has a file that ends too early"):
        reader.read_whole_tensors(saved_checkpoint, {"model": {"w": torch.zeros(64)}})


@pytest.mark.parametrize("dtype", sorted(index._DTYPES))
def test_every_dtype_has_a_place_in_an_index(dtype: str, tmp_path: Path) -> None:
    tensor = torch.ones(2).to(getattr(torch, dtype))
    saved_checkpoint = saved(tmp_path, {"model": {"w": tensor}})
    state = {"model": {"w": torch.zeros_like(tensor)}}
    reader.read_whole_tensors(saved_checkpoint, state)
    assert torch.equal(state["model"]["w"].to(torch.complex128), tensor.to(torch.complex128))


def test_an_index_is_the_same_after_it_was_written_and_read(tmp_path: Path) -> None:
    """Held against torch's own of the same state: shapes, dtypes, parts, and where they lie."""
    state = {"model": {"w": torch.ones(3, 5), "scalar": torch.tensor(2.0), "none": torch.ones(0)}}
    ours = dcp_reader.read_dcp_index(saved(tmp_path / "ours", state).path)
    theirs = dcp_reader.read_dcp_index(old_checkpoint.save(tmp_path / "theirs", state).path)
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for name, entry in ours.state_dict_metadata.items():
        other = theirs.state_dict_metadata[name]
        assert entry.properties.dtype == other.properties.dtype
        assert (entry.size, entry.chunks) == (other.size, other.chunks)
        for chunk in entry.chunks:
            place = MetadataIndex(name, chunk.offsets)
            assert ours.storage_data[place].relative_path == "__0_0.distcp"
            assert theirs.storage_data[place].relative_path == "__0_0.distcp"


class EarlyPickler(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 does: as what getattr returns."""

    def reducer_override(self, value: Any) -> Any:
        is_member = isinstance(value, enum.Enum)
        return (getattr, (type(value), value.name)) if is_member else NotImplemented


def early_pickle(value: Any) -> bytes:
    stream = io.BytesIO()
    EarlyPickler(stream).dump(value)
    return stream.getvalue()


def test_an_index_that_an_early_python_3_11_pickled_is_read(tmp_path: Path) -> None:
    path = old_checkpoint.save(tmp_path, {"model": {"w": torch.ones(3, 5)}}).path
    written = pickle.loads((path / manifest.PICKLED_INDEX).read_bytes())
    files = {file.name: manifest.Sum(file.stat().st_size, None) for file in path.iterdir()}
    content = early_pickle(written)
    assert b"getattr" in content
    assert index.read_index(content, files, pickled=True) == written


class Attribute:
    """Unpickled, an attribute of what is no enum."""

    def __reduce__(self) -> Any:
        return getattr, (Path, "unlink")


def test_no_attribute_of_anything_else_is_unpickled() -> None:
    with pytest.raises(CorruptCheckpointError, match=r"names builtins.getattr, which no index"):
        index.read_index(pickle.dumps(Attribute()), {}, pickled=True)
