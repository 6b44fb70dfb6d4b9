"""Changes a file of an interrupted run in one of eight ways, then runs the same command.

The command must complete the run from undamaged files, to the bit, and report the damage, or refuse
in one line.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from lab import (
    COMMON,
    STRATEGIES,
    Lab,
    Log,
    check_complete,
    check_nothing_is_left,
    checkpoints,
    end,
)

STRATEGY = "fsdp"
OF_CHECKPOINTS = ("__*_0.distcp", "index.json", "manifest.json")
OF_RUNS = ("config.yaml", "metrics.jsonl", "summary.json")


def truncate(file: Path, chance: random.Random) -> None:
    """Truncate a file at a random place."""
    os.truncate(file, chance.randrange(file.stat().st_size))


def empty(file: Path, _: random.Random) -> None:
    """Empty a file."""
    os.truncate(file, 0)


def flip(file: Path, chance: random.Random) -> None:
    """Flip a bit."""
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def append(file: Path, chance: random.Random) -> None:
    """Append noise."""
    file.write_bytes(file.read_bytes() + chance.randbytes(chance.randint(1, 300)))


def delete(file: Path, _: random.Random) -> None:
    """Delete a file."""
    file.unlink()


def replace(file: Path, chance: random.Random) -> None:
    """Replace a file by the previous checkpoint's, or by noise."""
    steps = sorted(file.parent.parent.glob("step_*"), key=lambda path: int(path.name[5:]))
    if steps:
        shutil.copy(steps[0] / file.name, file)
    else:
        file.write_bytes(chance.randbytes(file.stat().st_size))


def link(file: Path, _: random.Random) -> None:
    """Replace a file by a link to it."""
    file.symlink_to(file.rename(file.parent / f"aside-{file.name}"))


def fifo(file: Path, _: random.Random) -> None:
    """Replace a file by a pipe without a writer."""
    file.unlink()
    os.mkfifo(file)


CHANGES: tuple[Callable[[Path, random.Random], None], ...] = (
    *(truncate, empty, flip, append),
    *(delete, replace, link, fifo),
)
KINDS = list(itertools.product((*OF_CHECKPOINTS, *OF_RUNS), CHANGES))
"""File x change: 48."""


def run(lab: Lab, seed: int, log: Log) -> None:
    """Change one file of an interrupted run, and run the same command."""
    name, change = KINDS[seed % len(KINDS)]
    chance = random.Random(seed)
    expected = lab.losses(STRATEGY)
    command = lab.copy_of_stopped(STRATEGY, f"corruption-{seed}")
    folder = command.folder / "runs/run"
    if name in OF_CHECKPOINTS:
        folder = checkpoints(command)[-1]
    file = chance.choice(sorted(folder.glob(name)))
    newest = int(checkpoints(command)[-1].name[5:])
    log(f"{change.__name__} {file.relative_to(command.folder / 'runs/run')}", fault=True)
    before = file.read_bytes()
    change(file, chance)
    # Two checkpoints of one layout have the same index.
    is_harmed = not file.is_file() or file.is_symlink() or file.read_bytes() != before
    done = end(command.start("train", *COMMON, *STRATEGIES[STRATEGY]))
    check_nothing_is_left(command)
    if done.status:
        assert done.status == 2, f"exit status {done.status}: {done.text[-1500:]}"
        assert file.name in done.errors, f"the message does not name {file.name}: {done.errors}"
        assert len(checkpoints(command)) == 2, "a refused start changed the checkpoints"
        _check_refusal_is_allowed(name, done.errors)
        return
    if name in OF_CHECKPOINTS and is_harmed:
        assert "corrupt" in done.text, f"damage was passed over silently: {done.text[-1500:]}"
    if name == "config.yaml" and change not in (
        truncate,
        flip,
        link,
        delete,
    ):  # may leave it readable
        assert "config.yaml: can't be read" in done.text, f"silent: {done.text[-1500:]}"
    # Earlier logged steps were only in the changed file.
    check_complete(command, expected, from_step=newest + 1 if name == "metrics.jsonl" else 1)


def _check_refusal_is_allowed(name: str, errors: str) -> None:
    assert name not in OF_CHECKPOINTS, f"did not resume from the checkpoint before: {errors}"
