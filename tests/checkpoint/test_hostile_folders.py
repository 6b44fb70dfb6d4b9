"""A checkpoint's folder may be untrusted: edited, mixed or redirected files are refused."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.edited_checkpoints import FILES, edit, resum

from axonlaunch import checkpoint, config
from axonlaunch.checkpoint import Checkpoint, CorruptCheckpointError
from axonlaunch.checkpoint.exchange.safetensors import Reader
from axonlaunch.checkpoint.format import step_folders
from axonlaunch.checkpoint.loading import reader
from axonlaunch.checkpoint.saving.dcp_writer import Writer
from axonlaunch.config import ConfigError

STATE = {
    "model": {"w": torch.arange(64.0), "b": torch.ones(3, dtype=torch.bfloat16)},
    "optimizer": {"w.exp_avg": torch.ones(64)},
}
DATA = "__0_0.distcp"
CORRUPT = (CorruptCheckpointError, dcp.api.CheckpointException)


def saved(run_dir: Path, *, step: int = 1) -> Checkpoint:
    about = Checkpoint(step_folders.path_of(run_dir, step=step), step, 8 * step, 1, None)
    with reader.in_one_process():
        dcp.save(STATE, storage_writer=Writer(about), no_dist=True)
    return about


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def is_loaded(folder: Path) -> bool:
    """Return whether anything of a checkpoint reaches a state."""
    target = step_folders.read_checkpoint(folder)
    if target is None:
        return False
    try:
        checkpoint.load_model(target, {"w": torch.zeros(64)})
    except CORRUPT:
        return False
    return True


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file is left out": lambda about: about[FILES].pop(DATA),
    "a sum is null": lambda about: about[FILES][DATA].update(crc32=None),
    "a sum is left out": lambda about: about[FILES][DATA].pop("crc32"),
    "a size alone": lambda about: about[FILES].update({DATA: about[FILES][DATA]["bytes"]}),
    "another step": lambda about: about.update(step=7),
    "another format": lambda about: about.update(format=3),
    "no files": lambda about: about.update(files={}),
    "no checksum of itself": lambda about: about.pop("sha256", None),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_manifest_with_changed_bytes_is_refused(name: str, tmp_path: Path) -> None:
    target = saved(tmp_path)
    edit(target.path / "manifest.json", EDITS[name])
    flip(target.path / DATA)
    assert not is_loaded(target.path)
    assert checkpoint.list_checkpoints(tmp_path) == []
    assert list(checkpoint.corrupt_checkpoints(tmp_path)) == [target.path]


def test_manifest_lists_every_file_and_index_every_tensor(tmp_path: Path) -> None:
    target = saved(tmp_path)
    present = {file.name for file in target.path.iterdir()}
    assert present == {DATA, ".metadata", "index.json", "manifest.json"}
    assert step_folders.files(target).keys() == present - {"manifest.json"}
    tensors = json.loads((target.path / "index.json").read_text())["tensors"]
    assert sorted(tensors) == ["model.b", "model.w", "optimizer.w.exp_avg"]


class Malicious:
    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.victim}",)


def test_a_checkpoint_with_a_pickle_for_an_index_is_refused(tmp_path: Path) -> None:
    target, victim = saved(tmp_path), tmp_path / "victim"
    (target.path / "index.json").write_bytes(pickle.dumps(Malicious(victim)))
    resum(target.path)
    with pytest.raises(
        CorruptCheckpointError, match=r"has an index\.json that can't be understood"
    ):
        reader.contents(target)
    assert not victim.exists()


def test_pickled_index_of_torch_is_never_unpickled(tmp_path: Path) -> None:
    target, victim = saved(tmp_path), tmp_path / "victim"
    (target.path / ".metadata").write_bytes(pickle.dumps(Malicious(victim)))
    resum(target.path)
    assert is_loaded(target.path)
    assert step_folders.damage(target) == []
    assert "model.w" in reader.contents(target)
    assert not victim.exists()


def first_chunk(index: dict[str, Any]) -> dict[str, Any]:
    chunk: dict[str, Any] = index["tensors"]["model.w"]["chunks"][0]
    return chunk


INDEX_EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a file above": (
        lambda index: first_chunk(index).update(file="../secret"),
        "names ../secret, which the manifest does not list",
    ),
    "an absolute file": (
        lambda index: first_chunk(index).update(file="/etc/passwd"),
        "names /etc/passwd, which the manifest does not list",
    ),
    "a file that is not in the manifest": (
        lambda index: first_chunk(index).update(file="other"),
        "names other, which the manifest does not list",
    ),
    "beyond the file's end": (
        lambda index: first_chunk(index).update(offset=10**9),
        "puts model.w beyond the end of __0_0.distcp",
    ),
    "a tensor larger than what holds it": (
        lambda index: (
            first_chunk(index).update(sizes=[10**15]),
            index["tensors"]["model.w"].update(size=[10**15]),
        ),
        "gives model.w more values than its file holds",
    ),
    "parts that are missing": (
        lambda index: index["tensors"]["model.w"].update(size=[65]),
        "lacks parts of model.w",
    ),
    "a number for a tensor": (lambda index: index["tensors"].update({"model.w": 3}), ""),
    "null for a tensor": (lambda index: index["tensors"].update({"model.w": None}), ""),
    "a number for tensors": (lambda index: index.update(tensors=3), ""),
    "no such dtype": (
        lambda index: index["tensors"]["model.w"].update(dtype="save"),
        "gives 'model.w' no dtype or name that there is",
    ),
    "a size below 0": (lambda index: index["tensors"]["model.w"].update(size=[-64]), ""),
    "a fraction for an offset": (lambda index: first_chunk(index).update(offset=0.5), ""),
}


@pytest.mark.parametrize("name", INDEX_EDITS)
def test_index_that_contradicts_the_files_is_refused(name: str, tmp_path: Path) -> None:
    """With correct checksums, as from the writer of the files."""
    target = saved(tmp_path)
    change, reported = INDEX_EDITS[name]
    (tmp_path / "checkpoints" / "secret").write_bytes((target.path / DATA).read_bytes())
    edit(target.path / "index.json", change)
    resum(target.path)
    with pytest.raises(
        CorruptCheckpointError, match=reported or r"has an index\.json that can't be understood"
    ):
        reader.contents(target)
    assert not is_loaded(target.path)


@pytest.mark.parametrize("text", ["3", "null", "[" * 15_000, "{" * 15_000, '"x"', "", "\0", "NaN"])
@pytest.mark.parametrize("file", ["manifest.json", "index.json"])
def test_malformed_json_is_refused(file: str, text: str, tmp_path: Path) -> None:
    target = saved(tmp_path)
    (target.path / file).write_text(text)
    if file == "index.json":
        resum(target.path)
        with pytest.raises(
            CorruptCheckpointError, match=r"has an index\.json that can't be understood"
        ):
            reader.contents(target)
    else:
        assert checkpoint.corrupt_checkpoints(tmp_path) == {
            target.path: "has a manifest.json that can't be understood"
        }


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\0b"])
def test_manifest_with_a_path_outside_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    target = saved(tmp_path)
    (tmp_path / "checkpoints" / "secret").write_bytes(b"x")
    edit(
        target.path / "manifest.json", lambda about: about[FILES].update({name: about[FILES][DATA]})
    )
    resum(target.path)
    [reason] = checkpoint.corrupt_checkpoints(tmp_path).values()
    assert reason == f"has a manifest.json that names {name!r}, which is not a file name"


def linked(file: Path) -> None:
    aside = file.rename(file.parent.parent / f"aside-{file.name}")
    file.symlink_to(aside)


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


SWAPS = {"a link": linked, "a FIFO": piped, "a device": device}


@pytest.mark.parametrize("name", [DATA, "index.json", "manifest.json"])
@pytest.mark.parametrize("swap", SWAPS)
def test_irregular_checkpoint_file_is_refused(swap: str, name: str, tmp_path: Path) -> None:
    target = saved(tmp_path)
    SWAPS[swap](target.path / name)
    assert not is_loaded(target.path)
    [reason] = checkpoint.corrupt_checkpoints(tmp_path).values()
    assert reason == f"has {name}, which is not a regular file"


@pytest.mark.parametrize("swap", SWAPS)
def test_file_swapped_after_the_check_is_refused(swap: str, tmp_path: Path) -> None:
    target = saved(tmp_path)
    SWAPS[swap](target.path / DATA)
    with pytest.raises(CorruptCheckpointError, match="not a regular file"):
        reader.read_full_tensors(target, {"model": {"w": torch.zeros(64)}})


def test_a_checkpoint_that_is_a_link_is_refused_unless_a_user_names_it(tmp_path: Path) -> None:
    elsewhere = saved(tmp_path / "elsewhere", step=9)
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    link = run_dir / "checkpoints" / "step_9"
    link.symlink_to(elsewhere.path)
    assert checkpoint.list_checkpoints(run_dir) == []
    assert checkpoint.corrupt_checkpoints(run_dir) == {link: "is a link"}
    named = checkpoint.find_checkpoint(link)
    assert named is not None
    assert named.path == elsewhere.path


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"w": torch.ones(4)}, folder / "model.safetensors")
    return folder


def reading(folder: Path) -> Reader:
    return Reader(folder, config.load(["model=mlp", "data=synthetic_images"]).model)


@pytest.mark.parametrize("value", ["../outside.safetensors", "/etc/passwd", "..", 3, None, "a/b"])
def test_an_index_of_safetensors_names_files_of_its_folder(value: Any, weights: Path) -> None:
    (weights / "model.safetensors").rename(weights.parent / "outside.safetensors")
    text = json.dumps({"weight_map": {"w": value}})
    (weights / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json: names .*, which is not a file name"):
        reading(weights)


@pytest.mark.parametrize("text", ["3", "null", "[" * 15_000, '{"weight_map": 3}', "{}"])
def test_malformed_safetensors_index_is_refused(text: str, weights: Path) -> None:
    (weights / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json: can't be read"):
        reading(weights)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("swap", SWAPS)
def test_irregular_safetensors_file_is_refused(swap: str, name: str, weights: Path) -> None:
    text = json.dumps({"weight_map": {"w": "model.safetensors"}})
    (weights / "model.safetensors.index.json").write_text(text)
    SWAPS[swap](weights / name)
    with pytest.raises(ConfigError, match="not a regular file"):
        reading(weights)


def test_a_snapshot_of_the_hub_s_cache_is_read(weights: Path) -> None:
    """Its files are links to blobs in the same cache, and to no other files."""
    snapshot = weights.parent / "models--x" / "snapshots" / "main"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (weights / "model.safetensors").rename(blobs / ("a" * 64))
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / ("a" * 64))
    assert reading(snapshot).shapes() == {"w": (4,)}
    (blobs / ("a" * 64)).rename(blobs / "secret")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/secret"))
    with pytest.raises(ConfigError, match="not a regular file"):
        reading(snapshot)


def test_save_does_not_write_through_an_existing_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step_1.partial").symlink_to(victim)
    assert is_loaded(saved(tmp_path).path)
    assert list(victim.iterdir()) == []


def test_save_does_not_write_through_a_link_made_after_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from axonlaunch.checkpoint.saving import dcp_writer

    victim = tmp_path / "victim"
    victim.mkdir()

    def prepare(folder: Path) -> None:
        step_folders.prepare(folder)
        folder.parent.mkdir()
        step_folders.partial_of(folder).symlink_to(victim)

    monkeypatch.setattr(dcp_writer, "prepare", prepare)
    with pytest.raises(dcp.api.CheckpointException, match="FileExistsError"):
        saved(tmp_path)
    assert list(victim.iterdir()) == []
