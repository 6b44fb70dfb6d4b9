"""Files are read and written in place, and never through a replaced link."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from axonlaunch.system.storage import files


def link(path: Path) -> None:
    (path.parent / "victim").write_text("as it was")
    path.symlink_to(path.parent / "victim")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


SWAPS: dict[str, Callable[[Path], object]] = {
    "a link": link,
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": device,
}


@pytest.mark.parametrize("swap", SWAPS)
def test_special_files_are_not_read_or_appended(swap: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    SWAPS[swap](path)
    with pytest.raises(files.NotRegularError, match="is not a regular file"):
        files.open_regular(path)
    with pytest.raises(OSError, match=r"is not a regular file|No such device"):
        files.append_text(path, "text")
    if swap == "a link":
        assert (tmp_path / "victim").read_text() == "as it was"


def test_a_file_is_replaced_through_no_link(tmp_path: Path) -> None:
    path, victim = tmp_path / "summary.json", tmp_path / "victim"
    victim.write_text("as it was")
    path.symlink_to(victim)
    (tmp_path / "summary.json.partial").symlink_to(victim)
    files.replace_text(path, "new")
    assert path.read_text() == "new"
    assert not path.is_symlink()
    assert victim.read_text() == "as it was"
    assert not (tmp_path / "summary.json.partial").exists()


def test_failed_replace_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="directory"):
        files.replace_text(tmp_path / "file", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_too_large_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x" * 11)
    assert files.read_text(tmp_path / "file", at_most=11) == "x" * 11
    with pytest.raises(files.TooLargeError, match="is larger than 10 bytes"):
        files.read_text(tmp_path / "file", at_most=10)


def test_lock_ignores_equal_inode_on_another_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with files.folder_lock(tmp_path):
        assert files.is_locked(tmp_path)
    elsewhere = tmp_path / "locks"
    line = f"1: FLOCK  ADVISORY  WRITE 1 fff:fffff:{tmp_path.stat().st_ino} 0 EOF\n"
    elsewhere.write_text(line)
    monkeypatch.setattr(files, "LOCKS", elsewhere)
    assert not files.is_locked(tmp_path)
