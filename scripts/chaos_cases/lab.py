"""Folders for the cases, undisturbed reference runs, and checks.

This module knows how to start and judge a run, but no kind of harm.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from support.command import Command, Served, wait_for
from support.launchers import By, logged
from support.served import Server

STEPS = 40
COMMON = [
    *("model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=2"),
    *("data=synthetic_tokens", "data.sequence_length=16", "train.global_batch_size=12"),
    "train.micro_batch_size=2",  # steps that take long enough to be disturbed
    *(f"train.steps={STEPS}", "train.log_every=1", "train.eval_batches=2", "optimizer.eps=1e-5"),
    *("launch.threads=1", "checkpoint.every=4", "name=run"),
]
STRATEGIES = {
    "ddp": ["strategy=ddp", "launch.nproc=2"],
    "zero1": ["strategy=zero1", "launch.nproc=3"],
    "fsdp": ["strategy=fsdp", "launch.nproc=2"],
    "tensor": ["strategy=tensor", "launch.nproc=2"],
    "pipeline": ["strategy=pipeline", "strategy.pipeline.degree=2", "launch.nproc=2"],
    "hybrid": ["strategy=hybrid", "strategy.tensor.degree=1", "launch.nproc=4"],
}
CANARY = "executed"
"""File that untrusted code creates."""
GONE_S = 15
"""Seconds after which an ended run must have no process left."""
PATIENCE_S = 120
"""Seconds in which every command ends on a busy node."""


@dataclass
class Log:
    """Record of a case's actions.

    Attributes:
        lines: Descriptions of the actions.
        faults: Number of harmful actions.
    """

    lines: list[str] = field(default_factory=list)
    faults: int = 0

    def __call__(self, line: str, *, fault: bool = False) -> None:
        self.lines.append(line)
        self.faults += fault

    def __str__(self) -> str:
        return ", ".join(self.lines)


@dataclass(frozen=True)
class Ended:
    """The result of a command."""

    status: int
    output: str
    errors: str

    @property
    def text(self) -> str:
        """All printed output, in one line."""
        return " ".join((self.output + " " + self.errors).replace("│", " ").split())


class Lab:
    """A folder in which runs are harmed.

    Attributes:
        folder: Folder of all cases.
        server: Server for forking commands of cases that are not about processes.
    """

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder = folder
        self.server = server
        self._number = 0
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        self.losses = cache(self._losses)
        self.stopped = cache(self._stopped)

    def new(self, name: str) -> Path:
        """Create a folder for a case."""
        self._number += 1
        folder = self.folder / f"{self._number}-{name}"
        folder.mkdir()
        return folder

    def quick(self, folder: Path) -> Command:
        """Return the command without the time that imports take."""
        return Served(folder, self.server)

    def _losses(self, strategy: str) -> list[float]:
        """Return the losses of an undisturbed run, by step."""
        command = self.quick(self.new(f"undisturbed-{strategy}"))
        done = end(command.start("train", *COMMON, *STRATEGIES[strategy]))
        assert done.status == 0, f"the undisturbed run failed: {done.text}"
        losses = command.losses("run")
        assert len(losses) == STEPS
        return losses

    def _stopped(self, strategy: str) -> Path:
        """Return the folder of an interrupted run with two checkpoints, for copies."""
        command = self.quick(self.new(f"stopped-{strategy}"))
        process = command.start("train", *COMMON, *STRATEGIES[strategy])
        logged(command.folder / "runs/run/metrics.jsonl", STEPS - 12)
        process.send_signal(signal.SIGTERM)
        done = end(process)
        assert done.status == 130, f"a run that was interrupted ended otherwise: {done.text}"
        assert len(checkpoints(command)) == 2
        return command.folder

    def copy_of_stopped(self, strategy: str, name: str) -> Command:
        """Return the command in a new folder with a copy of the interrupted run."""
        template = self.stopped(strategy)
        folder = self.new(name)
        shutil.copytree(template / "runs", folder / "runs", symlinks=True)
        return self.quick(folder)

    def kill_what_is_left(self) -> None:
        """Kill processes that a failed case left running."""
        for pid in Command(self.folder).processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def plain(folder: Path, *prefix: str) -> By:
    """Return the command as a user starts it, in separate processes."""
    return By(folder, list(prefix))


def end(process: Any, *, seconds: float = PATIENCE_S, reports: bool = False) -> Ended:
    """Wait for a command, and check that it ends without a traceback, and with a message if it
    failed.

    Args:
        process: Process of the command.
        seconds: Time limit.
        reports: Whether findings are its output, so that it needs no other message.
    """
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"hangs: still running after {seconds:.0f} s") from None
    ended = Ended(process.returncode, output, errors)
    assert "Traceback" not in output + errors, f"a traceback: {errors[-2000:]}"
    # A command that fails must say why, unless a signal ended it.
    if ended.status > 0:
        says = errors + (output if reports or ended.status == 130 else "")
        assert says.strip(), f"silent: exit status {ended.status} and no message"
    return ended


def check_nothing_is_left(command: Command) -> None:
    """Check that all processes of a run end soon."""
    deadline = time.monotonic() + GONE_S
    while left := command.processes():
        if time.monotonic() > deadline:
            names = [f"{pid} {_words(pid)}" for pid in left]
            raise AssertionError(f"left after {GONE_S} s: {'; '.join(names)}")
        time.sleep(0.1)


def check_nothing_was_executed(folder: Path) -> None:
    """Check that no untrusted code ran."""
    assert not list(folder.rglob(CANARY)), "a stranger's code was executed"


def check_no_partial(command: Command) -> None:
    """Check that no partial save is left."""
    left = [str(path) for path in command.folder.rglob("*.partial*")]
    assert not left, f"left: {', '.join(left)}"


def check_complete(command: Command, expected: list[float], *, from_step: int = 1) -> None:
    """Check that a run has all steps once, with the expected losses to the bit.

    Args:
        command: Command whose folder has the run.
        expected: Losses of an undisturbed run.
        from_step: First step to check; earlier ones were damaged themselves.
    """
    lines = [line for line in command.lines("run") if "loss" in line]
    steps = [line["step"] for line in lines if line["step"] >= from_step]
    assert steps == list(range(from_step, STEPS + 1)), f"steps in metrics.jsonl: {steps}"
    losses = [line["loss"] for line in lines if line["step"] >= from_step]
    wrong = [
        step for step, a, b in zip(steps, losses, expected[from_step - 1 :], strict=True) if a != b
    ]
    assert not wrong, f"other losses from step {wrong[0]} on"
    assert command.summary("run")["status"] == "done", "summary.json does not say done"
    check_no_partial(command)


def complete(command: Command, overrides: list[str], expected: list[float]) -> Ended:
    """Run the same command again, undisturbed, and check that it completes the run."""
    done = end(command.start("train", *overrides))
    assert done.status == 0, (
        f"the same command again: exit status {done.status}: {done.text[-1500:]}"
    )
    check_nothing_is_left(command)
    check_complete(command, expected)
    check_nothing_was_executed(command.folder)
    return done


def checkpoints(command: Command) -> list[Path]:
    """Return a run's checkpoints, oldest first."""
    folder = command.folder / "runs/run/checkpoints"
    folders = [path for path in folder.glob("step_*") if path.name[5:].isdigit()]
    return sorted(folders, key=lambda path: int(path.name[5:]))


def steps_logged(command: Command) -> int:
    """Return the current number of lines in a run's metrics."""
    try:
        return (command.folder / "runs/run/metrics.jsonl").read_text().count("\n")
    except FileNotFoundError:
        return 0


def check_steps_so_far(command: Command) -> None:
    """Check that the steps logged until now occur once, in order."""
    path = command.folder / "runs/run/metrics.jsonl"
    if not path.exists():
        return
    lines = path.read_text().splitlines()
    full = [json.loads(line) for line in lines if line.endswith("}")]
    assert len(lines) - len(full) <= 1, "metrics.jsonl has lines that are cut"
    steps = [line["step"] for line in full if "loss" in line]
    assert steps == list(range(1, len(steps) + 1)), f"steps in metrics.jsonl: {steps}"


def wait_quietly(condition: Any, *, seconds: float) -> bool:
    """Wait until a condition holds; return whether it did in time."""
    try:
        wait_for(condition, seconds=seconds)
    except AssertionError:
        return False
    return True


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
    except OSError:
        return "gone since"
