"""A full disk or exhausted files are reported in words, starting with the failure summary."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.command import Command, wait_for
from support.launchers import By, logged, needs

MIB = 2**20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of one MiB."""
    needs("mount")
    folder = tmp_path / "small"
    folder.mkdir()
    with _mounted(folder, "size=1m"):
        yield folder


@pytest.fixture
def few_inodes(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 64 MiB that holds 400 files."""
    needs("mount")
    folder = tmp_path / "few"
    folder.mkdir()
    with _mounted(folder, "size=64m,nr_inodes=400"):
        yield folder


@contextmanager
def _mounted(folder: Path, options: str) -> Iterator[None]:
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disks can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def limited(axonlaunch: Command) -> Iterator[By]:
    """Return the command in a cgroup that limits the memory of all its processes to 900 MiB."""
    needs("sh")
    first = Path("/sys/fs/cgroup/memory")  # version 1 of cgroups
    root, key = (first, "limit_in_bytes") if first.exists() else (first.parent, "max")
    group = root / f"axonlaunch_test_{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no cgroups can be made here")
    try:
        (group / f"memory.{key}").write_text(str(900 * MIB))
        join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        yield By(axonlaunch.folder, ["sh", "-c", join, "sh"])
        wait_for(lambda: not (group / "cgroup.procs").read_text(), seconds=20)
    except PermissionError:
        pytest.skip("no memory limit can be set here")
    finally:
        group.rmdir()


def _take_inodes(disk: Path) -> None:
    folder = disk / "empty"
    folder.mkdir()
    for number in range(os.statvfs(disk).f_favail):
        (folder / str(number)).touch()


def _fill(disk: Path, *, leave: int = 0) -> None:
    free = shutil.disk_usage(disk).free
    with (disk / "fill").open("wb", buffering=0) as stream:
        stream.write(bytes(free - leave))


def _start(command: Command, faulty: list[str], disk: Path, *overrides: str) -> Any:
    common = [*faulty, "name=run", f"run_dir={disk}/run", "train.steps=9999"]
    return command.start("train", *common, "model.arguments={pause:0.1}", *overrides)


def _failed(process: Any, disk: Path) -> str:
    """Check that a run failed with a message, no traceback and no partial file; return the
    message.
    """
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1, errors
    assert errors.startswith("╭─ run failed")
    assert "Traceback" not in errors
    assert not list(disk.rglob("*.partial"))
    return " ".join(errors.replace("│", " ").split())


def test_full_disk_refuses_start(served: Command, faulty: list[str], small: Path) -> None:
    _fill(small)
    process = _start(served, faulty, small, "checkpoint.every=0")
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 2
    assert errors == (
        "error: run_dir: can't make the run folder: No space left on device; "
        "free some space, or use another\n"
    )
    assert not list(small.rglob("*.partial"))


def test_disk_without_inodes_refuses_start(
    served: Command, faulty: list[str], few_inodes: Path
) -> None:
    _take_inodes(few_inodes)
    _, errors = _start(served, faulty, few_inodes, "checkpoint.every=0").communicate(timeout=90)
    assert errors == (
        f"error: run_dir: can't make the run folder: No space left on device: {few_inodes}/run; "
        "delete some files, however small (each takes an inode), or use another\n"
    )


def test_exhausted_inodes_are_reported_as_inodes(
    served: Command, faulty: list[str], few_inodes: Path
) -> None:
    process = _start(served, faulty, few_inodes, "checkpoint.every=5")
    logged(few_inodes / "run/metrics.jsonl", 2)
    _take_inodes(few_inodes)
    reported = _failed(process, few_inodes)
    assert "No space left on device" in reported
    assert "has 0.06 GiB but" in reported
    assert "inodes free; delete some files, however small (each takes an inode)" in reported
    assert "free some space" not in reported


@pytest.mark.slow
def test_disk_full_while_logging_is_reported(
    served: Command, faulty: list[str], small: Path
) -> None:
    process = _start(served, faulty, small, "checkpoint.every=0")
    logged(small / "run/metrics.jsonl", 2)
    _fill(small)
    reported = _failed(process, small)
    assert "rank 0 of 2 failed first: No space left on device" in reported
    assert "summary.json could not be written: No space left on device" in reported
    assert "has 0.00 GiB free; free some space, or use another run_dir" in reported
    assert "predicted_peak_bytes" not in reported


def test_disk_full_while_saving_is_reported(
    served: Command, faulty: list[str], small: Path
) -> None:
    process = _start(served, faulty, small, "checkpoint.every=20", "checkpoint.async_save=false")
    logged(small / "run/metrics.jsonl", 2)
    _fill(small, leave=MIB // 32)
    reported = _failed(process, small)
    assert "run/checkpoints/step_20 could not be written: rank " in reported
    assert "free some space, or use another run_dir" in reported
    assert not list((small / "run/checkpoints").iterdir())


def test_deleted_run_folder_is_reported(served: Command, faulty: list[str], tmp_path: Path) -> None:
    process = _start(served, faulty, tmp_path, "checkpoint.every=0")
    logged(tmp_path / "run/metrics.jsonl", 2)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    reported = _failed(process, tmp_path)
    assert f"the run folder {tmp_path}/run is gone" in reported
    assert "was it deleted or renamed, or its disk unmounted?" in reported


def test_run_folder_deleted_during_save_ends_run(
    served: Command, faulty: list[str], tmp_path: Path
) -> None:
    process = _start(served, faulty, tmp_path, "checkpoint.every=5")
    run = tmp_path / "run"
    logged(run / "metrics.jsonl", 6)
    shutil.rmtree(run / "logs")
    for file in ("config.yaml", "metrics.jsonl"):
        (run / file).unlink()
    reported = _failed(process, tmp_path)
    assert f"the run folder {run} is gone" in reported
    assert not (run / "metrics.jsonl").exists()


def test_deleted_metrics_file_ends_run(served: Command, faulty: list[str], tmp_path: Path) -> None:
    process = _start(served, faulty, tmp_path, "checkpoint.every=0")
    metrics = tmp_path / "run/metrics.jsonl"
    logged(metrics, 2)
    metrics.unlink()
    assert f"{metrics} is gone" in _failed(process, tmp_path)
    assert not metrics.exists()


def test_a_save_does_not_create_a_deleted_run_folder_again(
    served: Command, faulty: list[str], tmp_path: Path
) -> None:
    # Only saves access the folder.
    saving = ["checkpoint.every=5", "checkpoint.async_save=false", "train.log_every=9999"]
    process = _start(served, faulty, tmp_path, *saving)
    wait_for((tmp_path / "run/checkpoints/step_5").is_dir, seconds=60)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    # a save may be faster than the first removal
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert f"the run folder {tmp_path}/run is gone" in _failed(process, tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("files", [13, 14])
def test_too_few_open_files_for_fork_server_is_reported(
    axonlaunch: Command, faulty: list[str], files: int
) -> None:
    needs("prlimit", root=False)
    by = By(axonlaunch.folder, ["prlimit", f"--nofile={files}:{files}"])
    ran = by("train", *faulty, "name=run", status=1)
    expected = "Too many open files; allow more with ulimit -n, or use fewer ranks"
    assert ran.stderr == f"error: {expected}\n"
    axonlaunch.wait_until_gone(seconds=3)


@pytest.mark.slow
@pytest.mark.parametrize("files", [19, 20, 26])
def test_too_few_open_files_for_run_is_reported(
    axonlaunch: Command, faulty: list[str], files: int
) -> None:
    needs("prlimit", root=False)
    by = By(axonlaunch.folder, ["prlimit", f"--nofile={files}:{files}"])
    ran = by("train", *faulty, "name=run", status=1)
    assert ran.stderr.startswith("╭─ run failed")
    assert "Too many open files" in ran.stderr
    assert f"a process may have {files} files open at once (ulimit -n" in ran.stderr
    assert "Traceback" not in ran.stderr
    axonlaunch.wait_until_gone(seconds=3)


@pytest.mark.slow
def test_rank_that_the_kernel_killed_for_memory_gets_the_limit_of_its_cgroup(limited: By) -> None:
    big = ["model.hidden_size=256", "train.global_batch_size=96", "name=run", "checkpoint.every=0"]
    ran = limited("train", *big, "strategy=ddp", "launch.nproc=2", status=1)
    said = " ".join(ran.stderr.replace("│", " ").split())
    assert "killed by SIGKILL; the kernel ended it because memory ran out" in said
    assert "; 450 MiB were available (a cgroup, as of a container or a job, limits all" in said
    assert "processes to 900 MiB) smallest changes that need less: " in said


def test_open_files_limit_is_raised_to_hard_limit() -> None:
    needs("prlimit", root=False)
    program = (
        "import resource; from axonlaunch.system.node import limits; limits.allow_open_files();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    command = ["prlimit", "--nofile=100:200", sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout == "(200, 200)\n"
