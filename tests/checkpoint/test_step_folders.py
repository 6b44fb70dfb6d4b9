"""Complete checkpoints, those that are kept, and detection of damage."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from axonlaunch import checkpoint
from axonlaunch.checkpoint import Checkpoint, CorruptCheckpointError, Retention
from axonlaunch.checkpoint.format import manifest, step_folders
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import RankFailedError, World

STATE = {
    "model": {f"layers.{n}.weight": torch.arange(64.0) + n for n in range(3)},
    "optimizer": {f"layers.{n}.weight.exp_avg": torch.ones(64) * n for n in range(3)},
}


def save(run_dir: Path, *steps: int, keep: Retention | None = None) -> None:
    def on_rank(world: World) -> None:
        saver = Saver(run_dir, world=world, retention=keep or Retention(newest=99))
        for step in steps:
            saver.save(STATE, step=step, samples=8 * step, eval_loss=abs(step - 2.0))
        saver.close()  # deletions are complete

    World.mock(1).run(on_rank)


def steps(run_dir: Path) -> list[int]:
    return [saved.step for saved in checkpoint.list_checkpoints(run_dir)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with checkpoints of steps 1 to 3."""
    run_dir = tmp_path_factory.mktemp("run")
    save(run_dir, 1, 2, 3)
    return run_dir


@pytest.fixture
def three(written: Path, tmp_path: Path) -> Path:
    """Return a copy of it to damage."""
    return Path(shutil.copytree(written, tmp_path / "run"))


@pytest.mark.parametrize(
    ("retention", "expected"),
    [
        (Retention(newest=1), [12]),
        (Retention(newest=3), [10, 11, 12]),
        (Retention(newest=1, every=5), [5, 10, 12]),
        (Retention(newest=2, best=1), [2, 11, 12]),
        (Retention(newest=1, every=6, best=2), [2, 3, 6, 12]),
    ],
)
def test_retention_keeps_newest_periodic_and_best(
    retention: Retention, expected: list[int]
) -> None:
    checkpoints = [
        Checkpoint(Path(str(n)), n, 8 * n, 1, None, eval_loss=abs(n - 2.4)) for n in range(1, 13)
    ]
    gone = step_folders.list_unkept(checkpoints, retention)
    assert [saved.step for saved in checkpoints if saved not in gone] == expected


@pytest.mark.parametrize("losses", [(math.nan, 1.0, 3.0), (1.0, math.nan, 3.0), (1.0, None, 3.0)])
def test_nan_loss_is_never_best(losses: tuple[float | None, ...]) -> None:
    checkpoints = [
        Checkpoint(Path(str(n)), n, n, 1, None, eval_loss=loss) for n, loss in enumerate(losses)
    ]
    gone = step_folders.list_unkept(checkpoints, Retention(newest=1, best=1))
    assert [saved.eval_loss for saved in checkpoints if saved not in gone] == [1.0, 3.0]


def test_save_deletes_checkpoints_beyond_retention(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, keep=Retention(newest=1, best=1))
    assert steps(tmp_path) == [2, 5]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step_2",
        "step_5",
    ]


def test_checkpoint_being_read_is_not_deleted(three: Path) -> None:
    with step_folders.reading(checkpoint.list_checkpoints(three)[0]):
        step_folders.prune(three, Retention(newest=1))
        assert steps(three) == [1, 3]
    step_folders.prune(three, Retention(newest=1))
    assert steps(three) == [3]


def in_the_way(run_dir: Path, step: int) -> None:
    """Prevent the deletion of a step's checkpoint by blocking the name that its folder needs
    first.
    """
    (run_dir / f"checkpoints/step_{step}.partial/file").mkdir(parents=True, exist_ok=True)


def test_failed_deletion_does_not_stop_other_deletions(three: Path) -> None:
    in_the_way(three, step=1)
    [path] = step_folders.prune(three, Retention(newest=1))
    assert path.name == "step_1"
    assert steps(three) == [1, 3]


def test_failed_deletion_is_reported_once_and_saves_continue(
    tmp_path: Path,
) -> None:
    warnings: list[str] = []

    def on_rank(world: World) -> None:
        saver = Saver(
            tmp_path,
            world=world,
            retention=Retention(newest=1),
            wrote=lambda: in_the_way(tmp_path, step=1),  # after the old ones are removed
            warn=warnings.append,
        )
        for step in (2, 3):
            saver.save(STATE, step=step, samples=8 * step)
        saver.close()

    save(tmp_path, 1)
    World.mock(1).run(on_rank)
    assert steps(tmp_path) == [1, 3]
    [warning] = warnings
    path = tmp_path / "checkpoints/step_1"
    assert warning.startswith(f"{path} is not kept and could not be deleted: OSError: ")


def test_leftover_that_can_not_be_deleted_is_not_reported_as_deleted(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    in_the_way(three, step=4)
    monkeypatch.setattr(step_folders, "delete", refuse)
    assert step_folders.sweep_partial(three) == []


def test_full_disk_is_reported_before_writing(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_folders, "free_bytes", lambda folder: (folder, 1000))
    reported = (
        r"step_4 could not be written: rank 0: .*No space left on device: it takes 0 MiB, and"
    )
    with pytest.raises(RankFailedError, match=reported):
        save(three, 4)
    assert steps(three) == [1, 2, 3]
    assert sorted(path.name for path in (three / "checkpoints").iterdir())[-1] == "step_3"


def test_readers_share_the_lock(three: Path) -> None:
    oldest = checkpoint.list_checkpoints(three)[0]
    with (
        step_folders.reading(oldest),
        step_folders.reading(oldest),
        (oldest.path / step_folders.MANIFEST).open() as file,
    ):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_saving_a_step_again_replaces_it(three: Path) -> None:
    old_manifest = (three / "checkpoints" / "step_2" / step_folders.MANIFEST).read_text()
    save(three, 2)
    assert steps(three) == [1, 2, 3]
    assert (three / "checkpoints" / "step_2" / step_folders.MANIFEST).read_text() != old_manifest
    assert not list((three / "checkpoints").glob("*.partial"))


def test_position_in_stream_is_read_as_it_was_saved(tmp_path: Path) -> None:
    position = {"samples": 9, "epoch": 1, "position": 2, "dataset": "{}"}
    saved = Checkpoint(tmp_path, step=1, samples=9, world_size=1, loss=None, data=position)
    text = manifest.manifest_to_json(saved, {manifest.INDEX: manifest.Sum(1, 0)})
    (tmp_path / manifest.MANIFEST).write_text(text)
    assert manifest.read_manifest(tmp_path).checkpoint == saved


def set_format(folder: Path, number: int) -> None:
    """Write another format number into a checkpoint's manifest."""
    file = folder / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": number}))


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "lacks manifest.json"),
        (
            lambda folder: (folder / "manifest.json").write_text("{"),
            "has a manifest.json that can't be understood",
        ),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "lacks __0_0.distcp"),
        (
            lambda folder: (folder / "__0_0.distcp").write_bytes(b"short"),
            "has 5 bytes of __0_0.distcp instead of ",
        ),
        (lambda folder: set_format(folder, 99), "has format 99; this version reads only format 4"),
        (lambda folder: set_format(folder, 3), "has format 3; this version reads only format 4"),
    ],
    ids=["no manifest", "half a manifest", "a file gone", "a file cut", "newer", "older"],
)
def test_incomplete_checkpoint_is_skipped_with_the_reason(
    three: Path, damage: Callable[[Path], object], reported: str
) -> None:
    folder = three / "checkpoints" / "step_3"
    damage(folder)
    assert steps(three) == [1, 2]
    [(path, reason)] = checkpoint.corrupt_checkpoints(three).items()
    assert path == folder
    assert reason.startswith(reported)
    assert checkpoint.corrupt_checkpoints(three, after=checkpoint.latest(three)) == {path: reason}


def test_damage_older_than_the_resumed_checkpoint_is_ignored(three: Path) -> None:
    (three / "checkpoints" / "step_1" / "index.json").unlink()
    assert checkpoint.corrupt_checkpoints(three, after=checkpoint.latest(three)) == {}


def test_leftover_of_an_interrupted_save_is_swept(three: Path) -> None:
    (three / "checkpoints" / "step_3").rename(three / "checkpoints" / "step_3.partial")
    assert steps(three) == [1, 2]
    assert checkpoint.corrupt_checkpoints(three) == {}
    assert checkpoint.sweep_partial(three) == ["step_3.partial"]


def test_every_flipped_bit_and_every_cut_is_found(three: Path) -> None:
    """200 of them, anywhere in any file of the state."""
    newest = checkpoint.latest(three)
    assert newest is not None
    draw = random.Random(0)
    files = sorted(step_folders.files(newest))
    full = {name: (newest.path / name).read_bytes() for name in files}
    for _ in range(200):
        name = draw.choice(files)
        content = bytearray(full[name])
        if draw.random() < 0.5:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        else:
            del content[draw.randrange(len(content)) :]
        (newest.path / name).write_bytes(content)
        assert step_folders.damage(newest) == [name]
        (newest.path / name).write_bytes(full[name])
    assert step_folders.damage(newest) == []


def test_changed_file_is_refused_and_the_previous_checkpoint_is_named(
    three: Path,
) -> None:
    last = checkpoint.latest(three)
    assert last is not None
    file = last.path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    def on_rank(world: World) -> None:
        with pytest.raises(CorruptCheckpointError) as caught:
            checkpoint.load_checkpoint(last, STATE, world=world)
        assert str(caught.value) == (
            f"{last.path}: __0_0.distcp is not what was written (its CRC-32 differs); resume from "
            f"the previous one with checkpoint.resume={last.path.with_name('step_2')}"
        )

    World.mock(1).run(on_rank)


def test_ranks_share_the_reading_of_checksums(three: Path) -> None:
    newest = checkpoint.latest(three)
    assert newest is not None
    for name in step_folders.files(newest):
        os.truncate(newest.path / name, 1)
    corrupted = [step_folders.damage(newest, part=part, parts=3) for part in range(3)]
    assert sorted(name for part in corrupted for name in part) == sorted(step_folders.files(newest))
