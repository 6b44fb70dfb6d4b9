"""Checkpoints at an fsspec URL: complete or absent, and readable in any layout."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import _fsspec_filesystem

from axonlaunch import checkpoint
from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.format import step_folders, storage
from axonlaunch.checkpoint.loading import diff
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.comm.errors import RankFailedError
from axonlaunch.config import ConfigError


@pytest.fixture
def bucket() -> Path:
    """Return a location in memory."""
    return storage.storage_path(f"memory://{uuid.uuid4().hex}/run")


def save(path: Path, *steps: int, ranks: int = 2, retention: Retention | None = None) -> None:
    """Save a state whose values are the step, from the ranks of the mock world."""

    def on_rank(world: World) -> None:
        saver = Saver(path, world=world, retention=retention or Retention(newest=9))
        for step in steps:
            state = {"model": {f"w{rank}": torch.full((8,), float(step)) for rank in range(ranks)}}
            saver.save(state, step=step, samples=step)
        saver.close()

    World.mock(ranks).run(on_rank)


def values(path: Path) -> set[float]:
    newest = checkpoint.latest(path)
    assert newest is not None

    def on_rank(world: World) -> set[float]:
        state: dict[str, Any] = {"model": {"w0": torch.zeros(8), "w1": torch.zeros(8)}}
        checkpoint.load_checkpoint(newest, state, world=world)
        return {float(v) for tensor in state["model"].values() for v in tensor}

    return set.union(*World.mock(1).run(on_rank))


def steps(path: Path) -> list[int]:
    return [c.step for c in checkpoint.list_checkpoints(path)]


def test_remote_checkpoint_is_saved_and_read(bucket: Path) -> None:
    save(bucket, 1, 2)
    assert steps(bucket) == [1, 2]
    assert values(bucket) == {2.0}
    first, second = checkpoint.list_checkpoints(bucket)
    assert {d.name for d in diff.compare_checkpoints(first, second)} == {"model.w0", "model.w1"}
    assert all(step_folders.damage(c) == [] for c in (first, second))


def test_remote_checkpoints_beyond_retention_are_deleted(bucket: Path) -> None:
    save(bucket, 1, 2, 3, 4, retention=Retention(newest=1, every=2))
    assert steps(bucket) == [2, 4]
    assert sorted(path.name for path in (bucket / "checkpoints").iterdir()) == ["step_2", "step_4"]


def test_remote_step_saved_again_replaces_the_old_one(bucket: Path) -> None:
    save(bucket, 3)
    old_manifest = (bucket / "checkpoints/step_3/manifest.json").read_text()
    save(bucket, 3, ranks=1)
    assert (bucket / "checkpoints/step_3/manifest.json").read_text() != old_manifest
    assert steps(bucket) == [3]


def test_remote_folder_without_manifest_is_swept(bucket: Path) -> None:
    save(bucket, 1, 2)
    (bucket / "checkpoints/step_2/manifest.json").unlink()
    assert steps(bucket) == [1]
    assert checkpoint.corrupt_checkpoints(bucket) == {}
    assert checkpoint.sweep_partial(bucket) == ["step_2"]
    assert [path.name for path in (bucket / "checkpoints").iterdir()] == ["step_1"]


@pytest.mark.parametrize("cut", [True, False])
def test_a_changed_file_is_named(bucket: Path, cut: bool) -> None:
    save(bucket, 1, 2)
    file = next(path for path in (bucket / "checkpoints/step_2").iterdir() if "__0" in path.name)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content[:-1] if cut else content))
    if cut:
        [(path, reason)] = checkpoint.corrupt_checkpoints(bucket).items()
        assert (path.name, steps(bucket)) == ("step_2", [1])
        assert f"bytes of {file.name} instead of" in reason
    else:
        with pytest.raises(
            RankFailedError, match=f"CorruptCheckpointError: .*{file.name} is not what was"
        ):
            values(bucket)


def test_failed_remote_save_keeps_the_previous_checkpoint(
    bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(bucket, 1)

    def full(self: Any, path: Any, mode: str) -> Any:
        raise OSError("507 Insufficient Storage")

    monkeypatch.setattr(_fsspec_filesystem.FileSystem, "create_stream", full)
    with pytest.raises(RankFailedError, match=r"SaveError: .*step_2 could not be written: .*507 "):
        save(bucket, 2, ranks=1)
    assert steps(bucket) == [1]
    assert checkpoint.sweep_partial(bucket) in ([], ["step_2"])


@pytest.mark.parametrize(
    ("url", "reported"),
    [
        ("nowhere://x/y", "nowhere://x/y: can't be reached: ValueError: "),
        ("gs://x/y", r"gs://x/y: .*gcsfs.*; pip install 'axonlaunch\[remote\]', and what fsspec"),
    ],
)
def test_unreachable_url_is_reported(url: str, reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        storage.storage_path(url)


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    assert storage.storage_path(f"file://{tmp_path}") == tmp_path
    assert not storage.is_remote(storage.storage_path(str(tmp_path)))


def test_torch_keeps_its_fsspec_storage_where_we_import_it() -> None:
    """If this fails: find torch's new classes for URLs, and change
    checkpoint/loading/dcp_reader.py.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.filesystem import FileSystemBase

    assert issubclass(_fsspec_filesystem.FsspecReader, FileSystemReader)
    assert issubclass(_fsspec_filesystem.FileSystem, FileSystemBase)
