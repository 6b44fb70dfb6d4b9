"""Disk space, files, permissions or the run folder run out during a run, which must say so.

Once they are available again, the same command completes the run.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lab import (
    COMMON,
    STRATEGIES,
    Ended,
    Lab,
    Log,
    check_no_partial,
    check_nothing_is_left,
    complete,
    end,
    plain,
    steps_logged,
)
from support.command import Command
from support.launchers import logged, needs

STRATEGY = "fsdp"
OVERRIDES = [*COMMON, *STRATEGIES[STRATEGY]]


def full_at_the_start(lab: Lab, chance: random.Random, log: Log) -> None:
    """No byte is free when the command begins."""
    with _disk(lab) as command:
        leave = chance.choice([0, 0, 1, 4]) * 4096
        _fill(command, log, leave=leave)
        _judge(
            command, end(command.start("train", *OVERRIDES)), "No space left on device", "MiB free"
        )
        _empty_again(lab, command)


def full_while_running(lab: Lab, chance: random.Random, log: Log) -> None:
    """The disk fills while a run logs and saves."""
    with _disk(lab) as command:
        process = command.start("train", *OVERRIDES)
        logged(command.folder / "runs/run/metrics.jsonl", chance.randint(1, 12), seconds=90)
        _fill(command, log, leave=chance.choice([0, 0, 1, 4, 16, 64]) * 4096)
        _judge(command, end(process), "No space left on device", "MiB free")
        _empty_again(lab, command)


def files_too_large(lab: Lab, chance: random.Random, log: Log) -> None:
    """File sizes are limited (ulimit -f)."""
    needs("prlimit", root=False)
    size = chance.choice([1_000, 10_000, 100_000, 200_000])
    log(f"ulimit -f {size} bytes", fault=True)
    folder = lab.new("fsize")
    limited = plain(folder, "prlimit", f"--fsize={size}:{size}")
    _judge(limited, end(limited.start("train", *OVERRIDES)), "File too large")
    complete(plain(folder), OVERRIDES, lab.losses(STRATEGY))


def too_few_files(lab: Lab, chance: random.Random, log: Log) -> None:
    """The number of open files is limited (ulimit -n)."""
    needs("prlimit", root=False)
    files = chance.randint(12, 34)
    log(f"ulimit -n {files}", fault=True)
    folder = lab.new("nofile")
    limited = plain(folder, "prlimit", f"--nofile={files}:{files}")
    _judge(limited, end(limited.start("train", *OVERRIDES)), "oo many open files")
    complete(plain(folder), OVERRIDES, lab.losses(STRATEGY))


def run_folder_is_gone(lab: Lab, chance: random.Random, log: Log) -> None:
    """The run folder, or a part of it, is deleted during the run."""
    part = chance.choice(["", "checkpoints", "logs"])
    command = plain(lab.new("gone"))
    process = command.start("train", *OVERRIDES)
    logged(command.folder / "runs/run/metrics.jsonl", chance.randint(1, 12), seconds=90)
    log(f"removed runs/run/{part}", fault=True)
    shutil.rmtree(command.folder / "runs/run" / part, ignore_errors=True)
    ended = end(process)
    if part:
        assert ended.status in (0, 1), f"exit status {ended.status}: {ended.text[-1500:]}"
    else:
        _judge(command, ended, "is gone")
        if ended.status:  # a save that began before the removal may have left its checkpoint
            shutil.rmtree(command.folder / "runs/run", ignore_errors=True)
    _complete(lab, command)


def checkpoints_are_denied(lab: Lab, _: random.Random, log: Log) -> None:
    """The folder of checkpoints can't be listed, so their existence is unknown."""
    needs("setpriv")
    command = lab.copy_of_stopped(STRATEGY, "denied")
    before = steps_logged(command)
    folder = command.folder / "runs/run/checkpoints"
    folder.chmod(0)
    log("EACCES of checkpoints", fault=True)
    # Root without the right to bypass permissions, because another user might not reach this
    # interpreter.
    rights = "--bounding-set=-dac_override,-dac_read_search"
    denied = plain(command.folder, "setpriv", rights)
    ended = end(denied.start("train", *OVERRIDES))
    _judge(denied, ended, "Permission denied")
    assert ended.status == 2, f"exit status {ended.status}: {ended.text[-1500:]}"
    assert steps_logged(command) == before, "metrics.jsonl was changed"
    folder.chmod(0o755)
    _complete(lab, command)


KINDS: tuple[Callable[[Lab, random.Random, Log], None], ...] = (
    full_at_the_start,
    full_while_running,
    files_too_large,
    too_few_files,
    run_folder_is_gone,
    checkpoints_are_denied,
)


def run(lab: Lab, seed: int, log: Log) -> None:
    """Let a resource run out, and restore it."""
    KINDS[seed % len(KINDS)](lab, random.Random(seed), log)


@contextmanager
def _disk(lab: Lab) -> Iterator[Command]:
    """Mount a small disk, and return the command in it."""
    needs("mount")
    folder = lab.new("disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        needs("a disk that can be mounted")
    try:
        yield plain(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(command: Command, log: Log, *, leave: int) -> None:
    log(f"the disk is full but for {leave} bytes", fault=True)
    free = shutil.disk_usage(command.folder).free
    with (command.folder / "fill").open("wb", buffering=0) as stream:
        stream.write(bytes(max(0, free - leave)))


def _empty_again(lab: Lab, command: Command) -> None:
    (command.folder / "fill").unlink()
    _complete(lab, command)


def _complete(lab: Lab, command: Command) -> None:
    complete(lab.quick(command.folder), OVERRIDES, lab.losses(STRATEGY))


def _judge(command: Command, ended: Ended, *reasons: str) -> None:
    """Check that a run that could not train said so and left no partial file; it may also
    succeed.
    """
    check_nothing_is_left(command)
    check_no_partial(command)
    if ended.status:
        assert ended.status in (1, 2), f"exit status {ended.status}: {ended.text[-1500:]}"
        is_said = any(reason in ended.text for reason in reasons)
        assert is_said, f"the message does not say why: {ended.text[-1500:]}"
        begins = ("error: ", "╭─ run failed")
        assert ended.errors.startswith(begins), f"the reason does not come first: {ended.errors}"
