"""Tokens of the cache are verified: changed files are created again, and links are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axonlaunch.config import ConfigError
from axonlaunch.config.options.documents import DocumentsConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.data import build_dataset
from axonlaunch.data.shards import cached_folder, shard_maker

FILES = ["tokens.bin", "lengths.bin", "rows.bin", "shard.json", "sums.json"]


@pytest.fixture
def documents(tmp_path: Path) -> Callable[..., Any]:
    """Builds a dataset of 300 rows, in a separate cache."""
    rows = [json.dumps({"text": f"{number} and more"}) for number in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))

    def build(*, verifies: bool = True, **keys: Any) -> Any:
        arguments = {"sequence_length": 16, "cache_dir": str(tmp_path / "cache"), **keys}
        config = DocumentsConfig(files=[str(tmp_path / "a.jsonl")], **arguments)
        return build_dataset(config, TokenizerConfig(name="bytes"), verifies=verifies)

    return build


def shard_folder(tmp_path: Path) -> Path:
    """Return the cached shard that starts with the first document."""
    folders = [*(tmp_path / "cache").iterdir()]
    return next(f for f in folders if (f / "rows.bin").read_bytes().startswith(b"\1\0\0\0"))


def inputs(dataset: Any) -> list[list[int]]:
    rows: list[list[int]] = dataset.samples(range(20), split="train").inputs.tolist()
    return rows


def change_a_byte(file: Path) -> None:
    """Change a byte in the middle of a file, which keeps its size."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("shuffle", ["all", "shards"])
def test_a_changed_file_of_the_cache_is_made_again_and_reported(
    name: str,
    shuffle: str,
    documents: Callable[..., Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    expected = inputs(documents(shuffle=shuffle))
    folder = shard_folder(tmp_path)
    old_content = {file.name: file.read_bytes() for file in folder.iterdir()}
    change_a_byte(folder / name)
    assert inputs(documents(shuffle=shuffle)) == expected
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == old_content
    assert f"data: {folder}: " in (said := capfd.readouterr().err)
    assert "its tokens are built again" in said


def test_zeroed_tokens_are_made_again(documents: Callable[..., Any], tmp_path: Path) -> None:
    expected = inputs(documents())
    file = shard_folder(tmp_path) / "tokens.bin"
    file.write_bytes(bytes(file.stat().st_size))
    assert inputs(documents()) == expected


def test_a_rank_that_maps_changed_tokens_fails_and_the_next_run_makes_them_again(
    documents: Callable[..., Any], tmp_path: Path
) -> None:
    expected = inputs(documents())
    change_a_byte(shard_folder(tmp_path) / "tokens.bin")
    os.utime(shard_folder(tmp_path))
    cached_shards_of_an_earlier_process()
    with pytest.raises(OSError, match="has changed since it was written; start the run again"):
        inputs(documents(verifies=False))
    assert inputs(documents(verifies=False)) == expected


def cached_shards_of_an_earlier_process() -> None:
    """Forget this process's mapped files, as a new process would not have them."""
    from axonlaunch.data.shards import token_cache

    token_cache._map_file.cache_clear()


@pytest.mark.parametrize("what", ["shard", "tokens.bin", "partial"])
def test_link_that_replaces_cached_tokens_is_refused(
    what: str, documents: Callable[..., Any], tmp_path: Path
) -> None:
    documents()
    folder = shard_folder(tmp_path)
    if what == "tokens.bin":
        (folder / what).rename(tmp_path / "elsewhere")
        target = folder / what
    else:
        folder.rename(tmp_path / "elsewhere")
        target = folder if what == "shard" else folder.with_name(f"{folder.name}.partial")
    target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"data.cache_dir.*(is a link|is not a regular file)"):
        documents()


def test_a_learned_tokenizer_that_was_changed_is_learned_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "a.txt").write_text("some text to learn " * 50)
    keys = {"sequence_length": 8, "cache_dir": str(tmp_path / "cache"), "held_out": 0}
    config = DocumentsConfig(files=[str(tmp_path / "a.txt")], **keys)
    tokenizer = TokenizerConfig(name="train", vocab_size=300)
    expected = build_dataset(config, tokenizer).encode("some text")
    [file] = (tmp_path / "cache").glob("tokenizer-*/tokenizer.json")
    file.write_bytes(bytes(file.stat().st_size))
    assert build_dataset(config, tokenizer).encode("some text") == expected
    assert "it is learned again" in capfd.readouterr().err


def test_files_of_a_shard_are_on_disk_before_it_gets_its_name(
    documents: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[str] = set()
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor: int) -> None:
        flushed.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def check_rename(path: Path, target: Path) -> Path:
        assert flushed >= {str(path), *(str(path / name) for name in FILES)}
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", check_rename)
    documents()
    assert str(tmp_path / "cache") in flushed


def test_an_unfinished_shard_whose_bytes_are_not_on_disk_is_begun_again(
    documents: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_maker, "_CHUNK_ROWS", 50)
    expected = inputs(documents(cache_dir=str(tmp_path / "other")))

    def fail(*args: object, **keys: object) -> None:
        raise OSError("the power is cut")

    with monkeypatch.context() as patched:
        patched.setattr(cached_folder, "publish", fail)
        with pytest.raises(ConfigError, match="the power is cut"):
            documents()
    [partial] = (tmp_path / "cache").glob("*.partial")
    progress = json.loads((partial / "shard.json").read_text())
    (partial / "progress.json").write_text(json.dumps(progress))
    size = (partial / "tokens.bin").stat().st_size
    (partial / "tokens.bin").write_bytes(bytes(size))
    assert inputs(documents()) == expected


def test_a_note_of_how_many_rows_a_shard_has_is_not_believed_when_it_was_changed(
    documents: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_maker, "SHARD_SIZE", 1000)
    positions = np.arange(150)
    expected = documents(shuffle="shards").order(positions, seed=1).tolist()
    notes = [*(tmp_path / "cache").glob("*/rows-*.json")]
    assert notes
    for note in notes:
        content = json.loads(note.read_text())
        note.write_text(json.dumps({**content, "rows": content["rows"] + 1}))
    assert documents(shuffle="shards").order(positions, seed=1).tolist() == expected
