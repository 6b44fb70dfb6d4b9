"""Ten mistakes and each peer's reaction, judged by exit status and output.

reported        it ended with an error that names the mistake, or continued correctly and said so
misreported     it ended with an error that does not
hung            it did not end
silently wrong  it ended as if nothing were wrong
works           there was nothing to report: it did the job
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from peer_environments import AXONLAUNCH, Job, Peer, command_of, final_loss, started

TIMEOUT_S = 8.0
"""Seconds after which each peer's setting should end a run with a stuck rank."""
_MISSPELLED = {
    "axonlaunch": ("grad_clip", "grad_clipp"),
    "torchrun": ("nproc-per-node", "nproc-per-nodez"),
    "accelerate": ("kwargs_handlers", "kwarg_handlers"),
    "Fabric": ("devices", "devicez"),
    "Lightning": ("gradient_clip_val", "gradient_clip_value"),
    "DeepSpeed": ("gradient_clipping", "gradient_cliping"),
}


PLAIN = Job()


@dataclass(frozen=True)
class Mistake:
    """A mistake or failure that users encounter.

    Attributes:
        name: Name in the table.
        job: Requested job.
        fault: Fault of ``small``: behavior of rank 1 in the third step.
        names: Regular expressions that a report must all match.
    """

    name: str
    job: Job = PLAIN
    fault: str = ""
    names: tuple[str, ...] = ()


_RANK_1 = r"\[?rank:? ?1\b|rank *: 1|local_rank: 1"
MISTAKES = [
    Mistake("a misspelled key"),
    Mistake("tensor degree 3 with 2 ranks", Job(degree=3), names=(r"\b3\b", r"world|device|rank")),
    Mistake("a batch of 7 samples on 2 ranks", Job(batch=7), names=(r"\b7\b", r"batch")),
    Mistake("an exception in rank 1", fault="exception", names=(_RANK_1, "planted")),
    Mistake("rank 1 is killed", fault="kill", names=(_RANK_1, r"SIGKILL|signal 9|exitcode *: -9")),
    Mistake("rank 1 is stopped", Job(timeout=TIMEOUT_S), fault="stop", names=(_RANK_1,)),
    Mistake(
        "rank 1 runs one extra collective",
        Job(timeout=TIMEOUT_S),
        fault="collective",
        names=(_RANK_1, r"all_?reduce|collective"),
    ),
    Mistake("the loss is NaN", Job(lr=1e30), names=(r"\bnan\b|\binf\b|not finite|no number",)),
]


def outcome(status: int | None, output: str, names: tuple[str, ...]) -> str:
    """Judge a run in which something was wrong."""
    if status is None:
        return "hung"
    is_named = all(re.search(name, output, re.IGNORECASE) for name in names)
    if status == 0:
        return "reported" if names and is_named else "silently wrong"
    return "reported" if is_named else "misreported"


def judge(peer: Peer, python: Path, mistake: Mistake, *, patience_s: float) -> tuple[str, str]:
    """Run a peer with a mistake; return the verdict and its last output."""
    names, replaced = mistake.names, ("", "")
    if not mistake.fault and mistake.job == PLAIN:
        replaced = _MISSPELLED[peer.name]
        names = (re.escape(replaced[1]),)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = command_of(peer, python, mistake.job, folder=folder, replaced=replaced)
        status, output = _ran(arguments, python, folder, patience_s, mistake.fault)
    if mistake.job.lr > 1 and status == 0:
        return "silently wrong", output  # a loss that is printed as nan is not a report
    return outcome(status, output, names), output


def judge_resuming(peer: Peer, python: Path, *, patience_s: float) -> dict[str, tuple[str, str]]:
    """Resume a peer on one rank, and from a checkpoint with a flipped bit."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(place: str, job: Job) -> tuple[int | None, str, float | None]:
            inside = folder / place
            inside.mkdir()
            arguments = command_of(peer, python, job, folder=inside)
            status, output = _ran(arguments, python, inside, patience_s)
            where = job.load or job.save or inside / "run"
            return status, output, final_loss(peer, where if peer is AXONLAUNCH else inside)

        saved, copies = folder / "saved", {}
        saved.mkdir()
        full, _ = run("whole", Job())[2], run("first", Job(steps=4, save=saved))
        # neutral names, which don't look like a report
        for number, kind in enumerate(("fewer", "corrupt")):
            copies[kind] = shutil.copytree(saved, folder / f"copy-{number}")
        _flip(copies["corrupt"])
        status, output, loss = run("again", Job(ranks=1, load=copies["fewer"]))
        is_same = loss is not None and full is not None and abs(loss - full) < 1e-3 * full
        fewer = "works" if is_same else "silently wrong"
        if status != 0:
            fewer = outcome(status, output, ("rank|world",))
        status, text, loss = run("flipped", Job(load=copies["corrupt"]))
        names = (r"corrupt|damaged|checksum|crc|hash",)
        return {
            "resuming a 2-rank checkpoint on 1 rank": (fewer, output),
            "resuming from a checkpoint with a changed bit": (outcome(status, text, names), text),
        }


def _flip(folder: Path) -> None:
    """Change a bit in the middle of the largest file, in weights or moments."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 64
    largest.write_bytes(content)


def _ran(
    arguments: list[str | Path], python: Path, folder: Path, patience_s: float, fault: str = ""
) -> tuple[int | None, str]:
    with started(arguments, python, folder=folder, fault=fault) as (process, _):
        try:
            status: int | None = process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            status = None
    return status, (folder / "output").read_text(errors="replace")
