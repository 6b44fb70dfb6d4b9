"""How runs on a GPU fail: each with its own cause, soon, and with nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import table

ENDS_IN_S = 60.0
"""From the failure, or where none is made from the start, to the end of the command."""
RUN = [
    *(
        "data=synthetic_tokens",
        "data.sequence_length=64",
        "train.steps=100000",
        "train.log_every=1",
    ),
    *("model=llama_debug", "sample.max_new_tokens=0", "train.eval_batches=0"),
    *("launch.nproc=1", "train.global_batch_size=8"),
]
SLEEPER = """
import time
import torch
from axonlaunch import register_model

@register_model("sleeper", inputs="tokens")
def build():
    return Sleeper()

class Sleeper(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.steps = torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256), 0

    def forward(self, tokens):
        self.steps += 1
        if self.steps > 3:
            time.sleep(1000)
        return self.head(self.embed(tokens))
"""


@dataclass(frozen=True)
class Case:
    """A way to fail.

    Attributes:
        overrides: Beside those of every run.
        expected: What standard error has to have, in lower case.
        needs_gpu: Whether a CPU has no such failure.
        provoke: What is done to the run's rank once it trains; None: nothing.
    """

    overrides: list[str]
    expected: str
    needs_gpu: bool = False
    provoke: Callable[[int], None] | None = None


CASES = {
    "out of memory": Case(
        ["model.hidden_size=8192", "model.num_hidden_layers=64", "train.global_batch_size=1024"],
        "memory",
        needs_gpu=True,
    ),
    "a token out of range": Case(["model.vocab_size=16", "data.vocab_size=256"], "vocab"),
    "killed": Case([], "sigkill", provoke=lambda pid: os.kill(pid, signal.SIGKILL)),
    "hung": Case(["plugins=[sleeper]", "model=sleeper", "launch.timeout_s=10"], "no progress"),
}


def main() -> int:
    """Let every case fail."""
    args = table.arguments(__doc__ or "")
    on_cuda = args.device == "cuda"
    cases = {name: case for name, case in CASES.items() if on_cuda or not case.needs_gpu}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sleeper.py").write_text(SLEEPER)
        return table.run(
            [*cases],
            args.only,
            lambda name: failed(name, cases[name], Path(folder), on_cuda=on_cuda),
        )


def failed(name: str, case: Case, folder: Path, *, on_cuda: bool) -> table.Row:
    """Let a run fail and look at how it ended."""
    overrides = [word for word in RUN if not (word.startswith("model=") and _has_model(case))]
    backend = "launch.backend=nccl" if on_cuda else "launch.backend=gloo"
    arguments = ["train", *overrides, *case.overrides, backend]
    run_dir = folder / "runs" / name.replace(" ", "-")
    metrics = run_dir / "metrics.jsonl"
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "axonlaunch", *arguments, f"name={run_dir.name}"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if case.provoke is not None:
        while process.poll() is None and not _trains(metrics) and table.seconds_left():
            time.sleep(0.1)
        began = time.monotonic()
        if (rank := rank_of(run_dir / "logs" / "rank_0.log")) is not None:
            case.provoke(rank)
    try:
        limit = min(ENDS_IN_S + 60, table.seconds_left())
        _, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        return table.Row(name, problem="it did not end")
    taken = time.monotonic() - began
    cells = {"status": str(process.returncode), "seconds": f"{taken:.1f}"}
    problems = []
    if not process.returncode:
        problems.append("it did not fail")
    if case.expected not in errors.lower():
        problems.append(f"{case.expected!r} is not in: {' '.join(errors.split())[-200:]}")
    if taken > ENDS_IN_S:
        problems.append(f"it took {taken:.0f} s to end")
    if on_cuda and (left := _computing()):
        problems.append(f"{left} processes still hold the device")
    return table.Row(name, cells, "; ".join(problems))


def _trains(metrics: Path) -> bool:
    return metrics.exists() and metrics.stat().st_size > 0


def _has_model(case: Case) -> bool:
    return any(word.startswith("model=") for word in case.overrides)


def rank_of(log: Path) -> int | None:
    """Return the process whose output goes to a rank's log; None: it has ended."""
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if output.readlink() == log.resolve():
                return int(output.parts[2])
        except OSError:  # another user's, or just ended
            continue
    return None


def _computing() -> int:
    asked = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return len(subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split())


if __name__ == "__main__":
    sys.exit(main())
