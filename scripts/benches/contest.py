"""Runs axonlaunch and the hand-written torchrun script on the same work."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
RIVAL = Path(__file__).with_name("torchrun_train.py")
MIB = 1024**2
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and ends contestants


@dataclass(frozen=True)
class Work:
    """Training task of both contestants."""

    strategy: str
    ranks: int
    steps: int
    batch: int
    hidden: int
    layers: int
    length: int
    log_every: int


@dataclass
class Contestant:
    """A running command and the file with its progress."""

    process: subprocess.Popen[bytes]
    folder: Path
    progress: Path
    started: float
    is_rank: Callable[[Path], bool]

    def first_step_s(self) -> float:
        """Wait for the first step; return the seconds from the command's start to its end."""
        while not (self.progress.exists() and self.progress.stat().st_size):
            if self.process.poll() is not None:
                raise SystemExit(f"{self.process.args!r} failed")
            time.sleep(0.002)
        return self.progress.stat().st_mtime - self.started

    def rank_pss_mib(self) -> float:
        """Return the mean proportional set size of the ranks, MiB."""
        sizes = []
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with contextlib.suppress(OSError, StopIteration):
                    if self.is_rank(process):
                        lines = (process / "smaps_rollup").read_text().splitlines()
                        pss = next(line for line in lines if line.startswith("Pss:"))
                        sizes.append(int(pss.split()[1]) * 1024)
        return statistics.mean(sizes) / MIB if sizes else float("nan")


@contextmanager
def axonlaunch(work: Work, *, model: Sequence[str] = ()) -> Iterator[Contestant]:
    """Start axonlaunch with a GPT of the work's sizes, or the model that overrides describe."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [
            *(BIN / "axonlaunch", "train", f"strategy={work.strategy}", f"run_dir={run}"),
            *("data=synthetic_tokens", f"data.sequence_length={work.length}"),
            *(model or gpt(work)),
            *(
                f"train.global_batch_size={work.batch}",
                f"train.steps={work.steps}",
                f"train.log_every={work.log_every}",
            ),
            *("train.eval_batches=0", "checkpoint.every=0"),
            f"launch.nproc={work.ranks}",
        ]

        def is_rank(process: Path) -> bool:
            return str((process / "fd" / "1").readlink()).startswith(str(run / "logs"))

        with _running(command, folder) as (process, started):
            yield Contestant(process, Path(folder), run / "metrics.jsonl", started, is_rank)


def gpt(work: Work) -> list[str]:
    """Return overrides of the model that ``torchrun_train`` trains."""
    sizes = [f"model.hidden_size={work.hidden}", f"model.num_hidden_layers={work.layers}"]
    return [*sizes, "model.num_attention_heads=4"]


@contextmanager
def torchrun(work: Work, *, script: Path = RIVAL) -> Iterator[Contestant]:
    """Start a rival."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "seconds")
        command = [
            *(BIN / "torchrun", "--standalone", f"--nproc-per-node={work.ranks}", script),
            *(f"--strategy={work.strategy}", f"--steps={work.steps}", f"--batch={work.batch}"),
            *(f"--hidden={work.hidden}", f"--layers={work.layers}", f"--length={work.length}"),
            *(f"--log-every={work.log_every}", f"--out={out}"),
        ]

        def is_rank(process: Path) -> bool:
            line = (process / "cmdline").read_bytes()
            return f"--out={out}".encode() in line and b"--standalone" not in line

        with _running(command, folder) as (process, started):
            yield Contestant(process, Path(folder), out, started, is_rank)


CONTESTANTS: dict[str, Callable[[Work], AbstractContextManager[Contestant]]] = {
    "axonlaunch": axonlaunch,
    "torchrun": torchrun,
}


@contextmanager
def _running(
    command: Sequence[object], folder: str
) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    started = time.time()
    process = subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        cwd=folder,
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        start_new_session=True,
    )
    try:
        yield process, started
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def step_seconds(contestant: Contestant) -> float:
    """Wait for the end and return the median seconds of a step, without the first one."""
    contestant.process.wait()
    text = contestant.progress.read_text().splitlines()
    if contestant.progress.name == "metrics.jsonl":
        lines = [line for line in map(json.loads, text) if "step_s" in line]
        return statistics.median(float(line["step_s"]) for line in lines[1:])
    return statistics.median(map(float, text[1:]))
