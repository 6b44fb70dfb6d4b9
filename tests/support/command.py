"""Runs the real command in real processes, in a temporary folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import served
from support.served import Server

TINY = [
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "data=synthetic_tokens",
    "data.sequence_length=16",
    "train.global_batch_size=8",
    "train.steps=6",
    "train.log_every=1",
    "train.eval_batches=2",
    "optimizer.eps=1e-5",
    # Saving takes a third of such a run's time, so only tests of checkpoints turn it on.
    "checkpoint.every=0",
]


@dataclass
class Command:
    """Runs the ``axonlaunch`` command in a folder.

    Attributes:
        folder: Working directory of the command.
    """

    folder: Path

    def start(self, *overrides: str) -> Any:
        """Start the command without waiting for it."""
        return subprocess.Popen(
            [sys.executable, "-m", "axonlaunch", *overrides],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=self.environment(),
        )

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the command."""
        return {**os.environ, "COLUMNS": "140"}

    def __call__(self, *overrides: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run the command until it ends and check its exit status."""
        process = self.start(*overrides)
        output, errors = process.communicate(timeout=90)
        assert process.returncode == status, f"{process.returncode}\n{output}\n{errors}"
        return subprocess.CompletedProcess(overrides, process.returncode, output, errors)

    def train(self, *overrides: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        return self("train", *TINY, *overrides, status=status)

    def losses(self, run: str) -> list[float]:
        return [line["loss"] for line in self.lines(run) if "loss" in line]

    def lines(self, run: str) -> list[dict[str, Any]]:
        text = (self.folder / "runs" / run / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def summary(self, run: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(
            (self.folder / "runs" / run / "summary.json").read_text()
        )
        return content

    def processes(self) -> list[int]:
        """Return the processes whose working directory is the folder: all processes of a run."""
        processes = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    here = (entry / "cwd").readlink()
                    alive = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
                except OSError:
                    continue
                if alive and (here == self.folder or self.folder in here.parents):
                    processes.append(int(entry.name))
        return processes

    def wait_until_gone(self, *, seconds: float = 10) -> None:
        """Check that all processes of a run end within some seconds."""
        wait_for(lambda: not self.processes(), seconds=seconds)


@dataclass
class Served(Command):
    """Forks the command and its ranks from a server that tests share."""

    server: Server

    def start(self, *overrides: str) -> served.Forked:
        """Start the command without waiting for it."""
        return served.Forked(
            served.command,
            self.server,
            *overrides,
            folder=self.folder,
            environment=self.environment(),
        )


def wait_for(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    """Wait until a condition holds; fail after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.05)


FAULTS = """
import os, signal, time
import torch
from torch import nn
from axonlaunch import register_model

class Faulty(nn.Module):
    def __init__(self, fault, rank, step, pause):
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)
        self.fault, self.rank, self.step, self.pause, self.calls = fault, rank, step, pause, 0

    def forward(self, tokens):
        self.calls += self.training
        if type(tokens) is torch.Tensor:  # in a rank: no estimate, and no check before it, waits
            time.sleep(self.pause)
        here = os.environ.get("RANK") == str(self.rank) and self.calls == self.step
        if here and self.fault != "none":
            if self.fault == "exception":
                raise ValueError("the fault of a test")
            if self.fault == "exit":
                os._exit(0)
            os.kill(os.getpid(), getattr(signal, self.fault))
        return self.head(self.embedding(tokens))

@register_model("faulty", inputs="tokens")
def build(fault="none", rank=1, step=3, pause=0.0):
    return Faulty(fault, rank, step, pause)
"""
