"""Direct I/O, which bypasses the kernel's cache, writes the exact input of any length."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from pathlib import Path
from unittest import mock

import pytest

from axonlaunch.checkpoint.saving import direct_io
from axonlaunch.checkpoint.saving.direct_io import DirectFile

SMALL = 3 * 4096


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "_BUFFER", SMALL)


@pytest.mark.parametrize("folder", ["disk", "memory"])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, SMALL, SMALL + 1, 5 * SMALL + 4097])
def test_direct_file_contains_the_written_bytes(tmp_path: Path, size: int, folder: str) -> None:
    path = tmp_path / "file" if folder == "disk" else Path(f"/dev/shm/axonlaunch-{os.getpid()}")
    content = random.Random(size).randbytes(size)
    try:
        with DirectFile(path) as file:
            offset, cut = 0, random.Random(1)
            while offset < size:
                part = content[offset : offset + cut.randrange(1, 2 * SMALL)]
                assert file.write(part) == len(part)
                offset += len(part)
                assert file.tell() == offset
        assert path.read_bytes() == content
    finally:
        path.unlink()


def test_file_system_without_direct_io_gets_cached_writes(tmp_path: Path) -> None:
    refused = []
    controlled, written = fcntl.fcntl, os.pwrite

    def control(file: int, command: int, flags: int = 0) -> int:
        if flags & direct_io._DIRECT:
            refused.append("open")
            raise OSError(errno.EINVAL, "no such flag here")
        return controlled(file, command, flags)

    with mock.patch.object(fcntl, "fcntl", control), DirectFile(tmp_path / "one") as file:
        file.write(b"x" * (SMALL + 5))
    assert (tmp_path / "one").read_bytes() == b"x" * (SMALL + 5)

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        if len(refused) < 2:
            refused.append("write")
            raise OSError(errno.EINVAL, "larger blocks, please")
        return written(file, data, offset)

    with mock.patch.object(os, "pwrite", pwrite), DirectFile(tmp_path / "two") as file:
        file.write(b"y" * (SMALL + 5))
    assert (tmp_path / "two").read_bytes() == b"y" * (SMALL + 5)
    assert refused == ["open", "write"]


def test_failed_disk_write_is_raised_by_a_later_write_or_close(tmp_path: Path) -> None:
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    file = DirectFile(tmp_path / "file")
    with mock.patch.object(os, "pwrite", full):
        file.write(b"x" * SMALL)
        with pytest.raises(OSError, match="No space left"):
            file.write(b"x" * SMALL)
    with mock.patch.object(os, "pwrite", full), pytest.raises(OSError, match="No space left"):
        file.close()
    assert file.closed


def test_existing_file_or_link_is_not_overwritten(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (tmp_path / "link").symlink_to(victim)
    for path in (victim, tmp_path / "link"):
        with pytest.raises(FileExistsError):
            DirectFile(path)
    assert victim.read_text() == "as it was"
