"""Passes a malicious run folder to every command that reads one.

No command may run its code, read or write files elsewhere, hang, or show a traceback.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab import (
    CANARY,
    COMMON,
    STEPS,
    STRATEGIES,
    Lab,
    Log,
    check_nothing_is_left,
    check_nothing_was_executed,
    end,
)
from support import stranger

STRATEGY = "fsdp"
SECRET = "what nobody else shall read"
CODE = f"""
from pathlib import Path
Path(__file__).with_name({CANARY!r}).touch()
def build():
    raise RuntimeError
"""
TRAIN = ["train", *(word for word in COMMON if "train.steps" not in word), *STRATEGIES[STRATEGY]]
COMMANDS = {
    "ls": ["checkpoint", "ls", "foreign"],
    "check": ["checkpoint", "check", "foreign"],
    "diff": ["checkpoint", "diff", "foreign", "foreign"],
    "export": ["checkpoint", "export", "foreign", "out"],
    "import": ["checkpoint", "import", "foreign", "out"],
    "sample": ["sample", "foreign", "--tokens", "3"],
    "resume": [*TRAIN, f"train.steps={STEPS}", "checkpoint.resume=foreign"],
    "weights": [*TRAIN, "train.steps=2", "model.weights=foreign"],
}


def pickled(run_dir: Path, folder: Path, chance: random.Random) -> None:
    """Put a pickle that creates a file where the index, or a rank's data, is read."""
    victim = chance.choice(["index.json", ".metadata", "__0_0.distcp"])
    (folder / victim).write_bytes(stranger.bomb(run_dir.parent / CANARY))
    _sign(folder, lists=victim)


def named_code(run_dir: Path, _folder: Path, _chance: random.Random) -> None:
    """Name code in every key of the configuration that can."""
    (run_dir.parent / "evil.py").write_text(CODE)
    config = (run_dir / "config.yaml").read_text().replace("plugins: []", "plugins: [evil]")
    (run_dir / "config.yaml").write_text(config)
    model = {"auto_map": {"AutoConfig": "evil.build", "AutoModelForCausalLM": "evil.build"}}
    (run_dir / "config.json").write_text(json.dumps({"model_type": "evil", **model}))
    shutil.copy(run_dir.parent / "evil.py", run_dir)


def bombs(run_dir: Path, folder: Path, chance: random.Random) -> None:
    """Write a configuration or index that takes all memory if it is read without limits."""
    text = chance.choice(
        [
            "a: &a [1,1,1,1,1,1,1,1,1]\n"
            + "".join(
                f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n"
                for a, b in itertools.pairwise("abcdefghij")
            ),
            "a: &a [*a]\n",
            "a: " + "{" * 15_000,
            "a: !!python/object/apply:os.system ['touch executed']",
        ]
    )
    (run_dir / "config.yaml").write_text(text)
    (folder / "index.json").write_text("[" * 1_000_000)
    _sign(folder)


def links(run_dir: Path, folder: Path, chance: random.Random) -> None:
    """Replace files by links to a file of the user."""
    for name in chance.sample(["index.json", "__0_0.distcp", "manifest.json"], 2):
        (folder / name).unlink()
        (folder / name).symlink_to(run_dir.parent / "secret")
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "metrics.jsonl").symlink_to(run_dir.parent / "secret")


def pipes(run_dir: Path, folder: Path, chance: random.Random) -> None:
    """Replace a file by an endless pipe or device."""
    file = folder / chance.choice(["index.json", "__0_0.distcp", "manifest.json"])
    config = run_dir / "config.yaml"
    for path in (file, *chance.sample([config], chance.randint(0, 1))):
        path.unlink()
        os.mkfifo(path) if chance.random() < 0.5 else path.symlink_to("/dev/zero")


def names_elsewhere(run_dir: Path, folder: Path, chance: random.Random) -> None:
    """Name a file outside of the folder in the index or manifest."""
    name = chance.choice(["../../../secret", str(run_dir.parent / "secret"), "..", "a\0b"])
    if chance.random() < 0.5:
        _sign(folder, lists=name)
        return
    index = json.loads((folder / "index.json").read_text())
    for tensor in index["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk["file"] = name
    (folder / "index.json").write_text(json.dumps(index))
    _sign(folder)


def impossible(_run_dir: Path, folder: Path, chance: random.Random) -> None:
    """Write impossible values into the index, with correct checksums."""
    index = json.loads((folder / "index.json").read_text())
    tensor = chance.choice(sorted(index["tensors"]))
    chunk = chance.choice(index["tensors"][tensor]["chunks"])
    key = chance.choice(sorted(chunk))
    chunk[key] = chance.choice([None, -1, 10**18, 0.5, [10**15], "x\x1b]0;title\x07", {}, True])
    (folder / "index.json").write_text(json.dumps(index))
    _sign(folder)


def other_sizes(_run_dir: Path, folder: Path, chance: random.Random) -> None:
    """Replace data by noise with a correct manifest: all checksums are right, but sizes do not
    match.
    """
    for file in folder.glob("*.distcp"):
        file.write_bytes(chance.randbytes(chance.choice([0, 1, file.stat().st_size])))
    _sign(folder)


HARMS: tuple[Callable[[Path, Path, random.Random], None], ...] = (
    *(pickled, named_code, bombs, links),
    *(pipes, names_elsewhere, impossible, other_sizes),
)
KINDS = list(itertools.product(HARMS, COMMANDS))
"""Harm x command: 64."""


def run(lab: Lab, seed: int, log: Log) -> None:
    """Pass a hostile folder to a command."""
    harm, name = KINDS[seed % len(KINDS)]
    command = lab.copy_of_stopped(STRATEGY, f"folder-{seed}")
    run_dir = (command.folder / "runs/run").rename(command.folder / "foreign")
    (command.folder / "runs").rmdir()
    secret = command.folder / "secret"
    secret.write_text(SECRET)
    newest = max(run_dir.glob("checkpoints/step_*"), key=lambda path: int(path.name[5:]))
    log(f"{harm.__name__} for {name}", fault=True)
    harm(run_dir, newest, random.Random(seed))
    reports = name in ("check", "diff")
    ended = end(command.start(*COMMANDS[name]), reports=reports)
    check_nothing_is_left(command)
    check_nothing_was_executed(command.folder)
    assert ended.status in (0, 1, 2), f"exit status {ended.status}: {ended.text[-1500:]}"
    assert SECRET not in ended.text, "a file that lies elsewhere was shown"
    assert "\x1b]" not in ended.output + ended.errors, "the stranger wrote to the terminal"
    assert secret.read_text() == SECRET, "a file that lies elsewhere was written to"


def _sign(folder: Path, *, lists: str | None = None) -> None:
    """Update a manifest's checksums, as the creator of a folder can.

    Implemented here, so that it does not repeat a fault of the manifest's code.

    Args:
        folder: Folder of the checkpoint.
        lists: Additional name to list.
    """
    about: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    if lists is not None:
        about["files"][lists] = {"bytes": len(SECRET), "crc32": zlib.crc32(SECRET.encode())}
    for name in about["files"]:
        if "\0" not in name and (folder / name).is_file():
            content = (folder / name).read_bytes()
            about["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    del about["sha256"]
    text = json.dumps(about, sort_keys=True, separators=(",", ":"))
    about["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(about))
