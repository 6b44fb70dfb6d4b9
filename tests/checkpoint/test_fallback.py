"""All ranks go back to the newest good checkpoint, and skip only damaged ones."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from axonlaunch import checkpoint
from axonlaunch.checkpoint import CorruptCheckpointError, Retention
from axonlaunch.checkpoint.format import step_folders, storage
from axonlaunch.checkpoint.loading import fallback, reader
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import RankFailedError, World
from axonlaunch.system.storage import files

RANKS = 3


def save(run_dir: Path, *steps: int, keep: int = 9) -> None:
    """Save a state whose values are the step, a tensor from each of three ranks."""

    def on_rank(world: World) -> None:
        saver = Saver(run_dir, world=world, retention=Retention(newest=keep))
        for step in steps:
            state = {f"w{rank}": torch.full((64,), float(step)) for rank in range(RANKS)}
            saver.save({"model": state}, step=step, samples=step)
        saver.close()

    World.mock(RANKS).run(on_rank)


def resume(run_dir: Path, *, skip_corrupt: bool = True) -> tuple[int | None, set[float], list[str]]:
    """Return the step that all ranks resumed from, their values, and the checkpoints set aside."""

    def on_rank(world: World) -> tuple[int | None, set[float], list[str]]:
        state: dict[str, Any] = {"model": {f"w{rank}": torch.zeros(64) for rank in range(RANKS)}}
        loaded = fallback.load_newest(
            run_dir, lambda: state, world=world, skip_corrupt=skip_corrupt
        )
        values = {float(v) for t in loaded.state.get("model", {}).values() for v in t}
        step = None if loaded.checkpoint is None else loaded.checkpoint.step
        return step, values, [*loaded.aside]

    first, *others = World.mock(RANKS).run(on_rank)
    assert all(other[:2] == first[:2] for other in others)
    assert all(other[2] == [] for other in others)
    return first


def flip(file: Path, *, at: int = -40) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(bytes(content))


@pytest.fixture(params=["folder", "bucket"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "folder":
        return tmp_path / "run"
    return storage.storage_path(f"memory://{uuid.uuid4().hex}/run")


@pytest.mark.parametrize("rank", range(RANKS))
def test_damage_found_by_one_rank_makes_all_ranks_fall_back(rank: int, run_dir: Path) -> None:
    save(run_dir, 1, 2)
    files_of = sorted(
        path
        for path in step_folders.files(checkpoint.list_checkpoints(run_dir)[-1])
        if "__" in path
    )
    flip(run_dir / "checkpoints" / "step_2" / files_of[rank % len(files_of)])
    step, values, [line] = resume(run_dir)
    assert (step, values) == (1, {1.0})
    assert "step_2 is corrupt: " in line
    assert "(its CRC-32 differs)" in line
    assert line.endswith("(its CRC-32 differs); it is kept as step_2.corrupt")
    assert [path.name for path in fallback.put_aside_before(run_dir)] == ["step_2.corrupt"]
    assert resume(run_dir) == (1, {1.0}, [])


def test_corrupt_checkpoints_set_aside_stay_unlisted_and_undeleted(run_dir: Path) -> None:
    save(run_dir, 1, 2)
    for number in (1, 2):  # the same step is corrupt again
        flip(run_dir / "checkpoints/step_2/index.json")
        assert resume(run_dir)[0] == 1
        save(run_dir, 2)
        assert len(fallback.put_aside_before(run_dir)) == number
    save(run_dir, 3, 4, keep=1)
    assert sorted(storage.sizes(run_dir / "checkpoints")) == [
        *("step_2.corrupt", "step_2.corrupt-2", "step_4"),
    ]
    assert checkpoint.sweep_partial(run_dir) == []
    assert set(fallback.put_aside_before(run_dir).values()) == {
        "has an index.json that is not what was written (its CRC-32 differs)"
    }


def test_ranks_load_the_same_step_while_another_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run", 1)
    save(tmp_path / "later", 2)
    look = step_folders.find_checkpoint

    def saved_after(path: Path, *, step: int | None = None) -> checkpoint.Checkpoint | None:
        found = look(path, step=step)
        later = step_folders.path_of(tmp_path / "later", step=2)
        if later.exists():
            later.rename(step_folders.path_of(tmp_path / "run", step=2))
        return found

    def on_rank(world: World) -> int | None:
        found = reader.find_for_all(tmp_path / "run", world=world)
        return found.step if found else None

    monkeypatch.setattr(step_folders, "find_checkpoint", saved_after)
    assert World.mock(RANKS).run(on_rank) == [1] * RANKS


def test_several_corrupt_checkpoints_are_set_aside(run_dir: Path) -> None:
    save(run_dir, 1, 2, 3, 4)
    (run_dir / "checkpoints/step_4/index.json").unlink()
    flip(run_dir / "checkpoints/step_3/index.json")
    flip(run_dir / "checkpoints/step_2/__0_0.distcp")
    step, values, lines = resume(run_dir)
    assert (step, values) == (1, {1.0})
    assert len(lines) == 3


def test_run_with_only_corrupt_checkpoints_does_not_start(run_dir: Path) -> None:
    save(run_dir, 1)
    flip(run_dir / "checkpoints/step_1/__0_0.distcp")
    for _ in range(2):
        with pytest.raises(RankFailedError, match="another name, or remove the corrupt files"):
            resume(run_dir)


def test_damage_is_an_error_without_fallback(run_dir: Path) -> None:
    save(run_dir, 1, 2)
    flip(run_dir / "checkpoints/step_2/__0_0.distcp")
    with pytest.raises(
        RankFailedError, match=r"resume from the previous one with checkpoint\.resume="
    ):
        resume(run_dir, skip_corrupt=False)
    assert fallback.put_aside_before(run_dir) == {}


def test_run_without_checkpoints_starts_from_step_0(run_dir: Path) -> None:
    assert resume(run_dir) == (None, set(), [])


def denied(*_: Any, **__: Any) -> Any:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "checkpoints")


LISTINGS: dict[str, Callable[[Path], object]] = {
    "latest": checkpoint.latest,
    "resolve": checkpoint.find_checkpoint,
    "corrupt_checkpoints": checkpoint.corrupt_checkpoints,
    "newest_valid": fallback.newest_valid,
    "sweep_partial": checkpoint.sweep_partial,
}


@pytest.mark.parametrize("name", LISTINGS)
def test_failed_listing_is_an_error_and_not_an_empty_run(
    name: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run_dir, 1)
    monkeypatch.setattr(os, "scandir", denied)
    if storage.is_remote(run_dir):
        monkeypatch.setattr(type(storage.filesystem(run_dir)), "ls", denied)
    with pytest.raises(PermissionError):
        LISTINGS[name](run_dir)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EMFILE])
def test_unreadable_file_is_not_reported_as_damage(
    number: int, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run_dir, 1, 2)

    def fail(path: Any) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    for module in (files, step_folders):
        monkeypatch.setattr(module, "open_regular", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        step_folders.read_checkpoint(run_dir / "checkpoints" / "step_2")
    with pytest.raises(OSError, match=os.strerror(number)):
        fallback.newest_valid(run_dir)
    monkeypatch.undo()
    newest = checkpoint.latest(run_dir)
    assert newest is not None
    monkeypatch.setattr(step_folders, "open_regular", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        step_folders.damage(newest)
    assert newest.step == 2


def test_disk_io_error_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    unreadable = checkpoint.list_checkpoints(tmp_path)[0]

    def fail(path: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(step_folders, "open_regular", fail)
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp"):
        reader.refuse_damage(unreadable)
