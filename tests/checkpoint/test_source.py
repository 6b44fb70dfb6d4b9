"""A checkpoint may be anybody's: reading it runs none of its words."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from axonlaunch.checkpoint import folders, reader
from axonlaunch.checkpoint.folders import Checkpoint
from axonlaunch.checkpoint.source import INDEX, source
from axonlaunch.checkpoint.writer import Writer


class Malicious:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def saved(run_dir: Path, state: dict[str, Any]) -> Checkpoint:
    about = Checkpoint(folders.path_of(run_dir, step=1), 1, 1, 1, None)
    with reader.in_one_process():
        dcp.save(state, storage_writer=Writer(about), no_dist=True)
    return about


def test_an_index_that_names_a_function_is_refused_and_does_not_call_it(tmp_path: Path) -> None:
    found = saved(tmp_path, {"model": {"w": torch.ones(2)}})
    victim = tmp_path / "victim"
    (found.path / INDEX).write_bytes(pickle.dumps(Malicious(f"touch {victim}")))
    with pytest.raises(pickle.UnpicklingError, match=r"names posix.system, which no index needs"):
        source(found.path).read_metadata()
    assert not victim.exists()


def test_a_value_that_is_no_tensor_is_not_unpickled(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    found = saved(tmp_path, {"model": {"w": Malicious(f"touch {victim}")}})
    victim.unlink(missing_ok=True)
    with pytest.raises(dcp.api.CheckpointException, match="is no tensor, and not unpickled"):
        reader.read(found, {"model": {"w": torch.zeros(2)}})
    assert not victim.exists()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_every_usual_dtype_has_a_place_in_an_index(dtype: torch.dtype, tmp_path: Path) -> None:
    found = saved(tmp_path, {"model": {"w": torch.ones(2, dtype=dtype)}})
    state = {"model": {"w": torch.zeros(2, dtype=dtype)}}
    reader.read(found, state)
    assert state["model"]["w"].tolist() == torch.ones(2, dtype=dtype).tolist()
