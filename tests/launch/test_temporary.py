"""No run leaves a temporary folder, however it ends and wherever TMPDIR is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from axonlaunch.system.processes import temporary_folders

HOLDING = """
from axonlaunch.system.processes import temporary_folders as temporary
with temporary.temporary_folder() as made:
    print(made, flush=True)
    input()
"""


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    short = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(temporary_folders, "_LONGEST", 4000)
    monkeypatch.setenv("TMPDIR", str(short))
    return short


def test_a_folder_is_gone_when_it_is_left(base: Path) -> None:
    with temporary_folders.temporary_folder() as folder:
        assert folder.parent == base
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
    assert list(base.iterdir()) == []


def test_the_folder_of_a_killed_process_is_deleted_by_the_next_and_no_other(base: Path) -> None:
    command = [
        sys.executable,
        "-c",
        HOLDING.replace("\nwith", "\ntemporary._LONGEST = 4000\nwith"),
    ]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    (base / "axonlaunch-of-a-user").mkdir()
    killed, alive = processes
    left, busy = (Path(p.stdout.readline().strip()) for p in processes if p.stdout)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert left.is_dir()
    with temporary_folders.temporary_folder():
        assert not left.exists()
        assert busy.is_dir()
        assert (base / "axonlaunch-of-a-user").is_dir()
    alive.communicate("\n", timeout=60)
    assert not busy.exists()


def test_temporary_folder_avoids_long_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 40)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with temporary_folders.temporary_folder() as folder:
        assert len(str(folder / "listener-01234567")) <= 107
    assert list(long.iterdir()) == []


def test_no_other_module_makes_temporary_folders_that_a_killed_run_would_leave() -> None:
    package = Path(temporary_folders.__file__).parents[1]
    importing = [
        path.name for path in package.rglob("*.py") if "import tempfile" in path.read_text()
    ]
    assert importing == ["temporary_folders.py"]
