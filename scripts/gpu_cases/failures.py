"""Failures of runs on a GPU: each reports its cause quickly, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import table

ENDS_IN_S, ENDS_AFTER_S = 60.0, 15.0
"""Seconds on a GPU: from a command's start to its end, and from a provoked failure to the end."""
LESS = "smallest changes that need less:\n"
"""A report lists overrides after this text, one per line."""
RUN = [
    *(
        "data=synthetic_tokens",
        "data.sequence_length=64",
        "train.steps=100000",
        "train.log_every=1",
    ),
    *("model=llama_debug", "train.eval_batches=0"),
    *("launch.nproc=1", "train.global_batch_size=8"),
]
MODELS = """
import time
import torch
from axonlaunch import register_model

@register_model("sleeper", inputs="tokens")
def sleeper():
    return Embedded(256, sleeps=True)

@register_model("small", inputs="tokens")
def small():
    return Embedded(16)

class Embedded(torch.nn.Module):
    def __init__(self, tokens, sleeps=False):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(tokens, 8), torch.nn.Linear(8, 256)
        self.sleeps, self.steps = sleeps, 0

    def forward(self, tokens):
        self.steps += 1
        if self.sleeps and self.steps > 3:
            time.sleep(1000)
        if not self.sleeps and self.steps <= 3:
            tokens = tokens % 16
        return self.head(self.embed(tokens))
"""


@dataclass(frozen=True)
class Case:
    """A kind of failure.

    Attributes:
        overrides: Overrides in addition to those of every run.
        expected: Required text of standard error, in lower case; a pair for a GPU and a CPU, if
            they differ.
        needs_gpu: Whether the failure can't occur on a CPU.
        provoke: Function that is called with the run's rank once it trains; None calls nothing.
        retried: Whether the run must train with the first changes that the report names.
        tasks: Number of ranks that another launcher starts; each sees only the first
            device.
    """

    overrides: list[str]
    expected: str | tuple[str, str]
    needs_gpu: bool = False
    provoke: Callable[[int], None] | None = None
    retried: bool = False
    tasks: int = 0

    def has_to_report(self, *, on_cuda: bool) -> str:
        """Return the required text of standard error."""
        return self.expected if isinstance(self.expected, str) else self.expected[not on_cuda]


CASES = {
    "out of memory": Case(
        [
            *("model.hidden_size=2048", "model.num_hidden_layers=32"),
            *("train.global_batch_size=1024", "train.matmul_precision=high"),
        ],
        "memory",
        needs_gpu=True,
        retried=True,
    ),
    "a token out of range": Case(
        ["plugins=[embedded]", "model=small"], ("device-side assert", "out of range")
    ),
    "killed": Case([], "sigkill", provoke=lambda pid: os.kill(pid, signal.SIGKILL)),
    "hung": Case(["plugins=[embedded]", "model=sleeper", "launch.timeout_s=10"], "no progress"),
    "two tasks, one device": Case([], "launch.backend=nccl: 2 ranks need", tasks=2),
}


def main() -> int:
    """Run every case."""
    args = table.arguments(__doc__ or "")
    on_cuda = args.device == "cuda"
    cases = {name: case for name, case in CASES.items() if on_cuda or not case.needs_gpu}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "embedded.py").write_text(MODELS)
        return table.run(
            [*cases],
            args.only,
            lambda name: failed(name, cases[name], Path(folder), on_cuda=on_cuda),
        )


def failed(name: str, case: Case, folder: Path, *, on_cuda: bool) -> table.Row:
    """Let a run fail and check how it ended."""
    overrides = [word for word in RUN if not (word.startswith("model=") and _has_model(case))]
    if case.tasks:
        overrides.remove("launch.nproc=1")
    backend = "launch.backend=nccl" if on_cuda or case.tasks else "launch.backend=gloo"
    arguments = [*overrides, *case.overrides, backend]
    run_dir = folder / "runs" / name.replace(" ", "-").replace(",", "")
    metrics = run_dir / "metrics.jsonl"
    began, ends_in_s = time.monotonic(), ENDS_IN_S
    environments = _tasks(case.tasks) if case.tasks else [{}]
    process, *others = [
        _train([*arguments, f"name={run_dir.name}"], folder, environment)
        for environment in environments
    ]
    if case.provoke is not None:
        while process.poll() is None and not _trains(metrics) and table.seconds_left():
            time.sleep(0.1)
        began, ends_in_s = time.monotonic(), ENDS_AFTER_S
        if (rank := rank_of(run_dir / "logs" / "rank_0.log")) is not None:
            case.provoke(rank)
    try:
        limit = min(ends_in_s + 60, table.seconds_left())
        _, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        return table.Row(name, problem="it did not end")
    finally:
        for other in others:
            other.kill()
            other.wait()
    taken = time.monotonic() - began
    cells = {"status": str(process.returncode), "seconds": f"{taken:.1f}"}
    problems = []
    if not process.returncode:
        problems.append("it did not fail")
    if (expected := case.has_to_report(on_cuda=on_cuda)) not in errors.lower():
        problems.append(f"{expected!r} is not in: {' '.join(errors.split())[-200:]}")
    if on_cuda and taken > ends_in_s:
        problems.append(f"it took {taken:.0f} s to end")
    if left := table.computing(lambda pid: _runs_in(folder, pid)):
        problems.append(f"{len(left)} processes still hold the device")
    if case.retried and not problems:
        cells["tried again with"], problem = _retried(arguments, errors, folder)
        problems += [problem] * bool(problem)
    if problems:
        table.why(name, errors)
    return table.Row(name, cells, "; ".join(problems))


def _retried(arguments: list[str], errors: str, folder: Path) -> tuple[str, str]:
    """Return the first changes that a report names, and their error, if any."""
    changes = errors.partition(LESS)[2].partition("\n")[0].split()
    if not changes:
        return "", f"no changes are named in: {' '.join(errors.split())[-200:]}"
    process = _train([*arguments, *changes, "train.steps=3", "name=again"], folder, {})
    try:
        _, errors = process.communicate(timeout=table.seconds_left())
    except subprocess.TimeoutExpired:
        process.kill()
        return " ".join(changes), "with these changes it did not end"
    problem = table.why("tried again", errors) if process.returncode else ""
    return " ".join(changes), f"with these changes: {problem}" * bool(problem)


def _train(
    arguments: list[str], folder: Path, environment: dict[str, str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "axonlaunch", "train", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _tasks(count: int) -> list[dict[str, str]]:
    """Return another launcher's variables for each rank of this node."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": first,
    }
    return [{**shared, "RANK": str(task), "LOCAL_RANK": str(task)} for task in range(count)]


def _trains(metrics: Path) -> bool:
    return metrics.exists() and metrics.stat().st_size > 0


def _has_model(case: Case) -> bool:
    return any(word.startswith("model=") for word in case.overrides)


def rank_of(log: Path) -> int | None:
    """Return the process that writes a rank's log; None if it has ended."""
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if output.readlink() == log.resolve():
                return int(output.parts[2])
        except OSError:  # another user's, or just ended
            continue
    return None


def _runs_in(folder: Path, pid: int) -> bool:
    here = Path(f"/proc/{pid}/cwd").readlink()
    return here == folder.resolve() or folder.resolve() in here.parents


if __name__ == "__main__":
    sys.exit(main())
