"""A checkpoint holds only tensors, of every usual dtype; nothing else in it is unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from axonlaunch.checkpoint import Checkpoint, CorruptCheckpointError, load_checkpoint
from axonlaunch.checkpoint.format import index, step_folders
from axonlaunch.checkpoint.loading import reader
from axonlaunch.checkpoint.saving.dcp_writer import Writer
from axonlaunch.comm import World


def saved(run_dir: Path, state: dict[str, Any]) -> Checkpoint:
    about = Checkpoint(step_folders.path_of(run_dir, step=1), 1, 1, 1, None)
    with reader.in_one_process():
        dcp.save(state, storage_writer=Writer(about), no_dist=True)
    return about


def test_saving_a_value_that_is_not_a_tensor_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        dcp.api.CheckpointException, match=r"model\.w is not a tensor; a checkpoint "
    ):
        saved(tmp_path, {"model": {"w": "text"}})
    assert step_folders.latest(tmp_path) is None


@pytest.mark.parametrize(
    "wanted",
    [torch.zeros(6, 4), torch.zeros(4, 6).t(), torch.zeros(6, 4, dtype=torch.bfloat16)],
    ids=["as it was saved", "transposed in memory", "of another dtype"],
)
def test_tensor_is_read_into_any_dtype_and_memory_order(wanted: Tensor, tmp_path: Path) -> None:
    tensor = torch.arange(48.0).view(4, 12).t()[::2]  # neither contiguous nor all of its storage
    target = saved(tmp_path, {"model": {"before": torch.ones(3, dtype=torch.int8), "w": tensor}})
    reader.read_full_tensors(target, {"model": {"w": wanted}})
    assert torch.equal(wanted.float(), tensor)


@pytest.mark.parametrize("dim", [0, 1])
def test_shard_of_a_tensor_is_read(dim: int, tmp_path: Path) -> None:
    tensor = torch.arange(24.0).view(6, 4)
    saved_checkpoint = saved(tmp_path, {"model": {"w": tensor}})

    def read(world: World) -> Tensor:
        mesh = init_device_mesh("cpu", (world.world_size,))
        part = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(dim)])
        load_checkpoint(saved_checkpoint, {"model": {"w": part}}, world=world)
        return part.to_local()

    assert torch.equal(torch.cat(World.mock(2).run(read), dim), tensor)


def test_truncated_tensor_file_is_refused(tmp_path: Path) -> None:
    saved_checkpoint = saved(tmp_path, {"model": {"w": torch.ones(64)}})
    file = saved_checkpoint.path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match="has a file that ends too early"):
        reader.read_full_tensors(saved_checkpoint, {"model": {"w": torch.zeros(64)}})


@pytest.mark.parametrize("dtype", sorted(index._DTYPES))
def test_every_dtype_is_saved_and_read(dtype: str, tmp_path: Path) -> None:
    tensor = torch.ones(2).to(getattr(torch, dtype))
    saved_checkpoint = saved(tmp_path, {"model": {"w": tensor}})
    state = {"model": {"w": torch.zeros_like(tensor)}}
    reader.read_full_tensors(saved_checkpoint, state)
    assert torch.equal(state["model"]["w"].to(torch.complex128), tensor.to(torch.complex128))
