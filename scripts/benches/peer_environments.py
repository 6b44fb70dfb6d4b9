"""The peers of ``scripts/bench peers``: their environments and start commands.

An environment uses the torch of the current one, and installs only the peer from PyPI.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).with_name("peer_scripts")
_MARK = "PEERS_RUN"


@dataclass(frozen=True)
class Peer:
    """A tool that trains the same transformer.

    Attributes:
        name: Name in the table.
        requirement: Requirement for pip; empty if the current environment has it.
        script: File in ``peer_scripts`` with everything that a user writes.
        under_torchrun: Whether torchrun starts it; otherwise it starts its ranks itself.
        needs: Module that must be importable to run it on a CPU.
    """

    name: str
    requirement: str
    script: str
    under_torchrun: bool = True
    needs: str = ""


AXONLAUNCH = Peer("axonlaunch", "", "experiment/small.yaml", under_torchrun=False)
PEERS = [
    AXONLAUNCH,
    Peer("torchrun", "", "torchrun_train.py"),
    Peer("accelerate", "accelerate==1.15.0", "accelerate_train.py", needs="accelerate"),
    Peer("Fabric", "lightning==2.6.6", "fabric_train.py", False, needs="lightning.fabric"),
    Peer("Lightning", "lightning==2.6.6", "lightning_train.py", False, needs="lightning"),
    Peer("DeepSpeed", "deepspeed==0.19.8", "deepspeed_train.py", needs="deepspeed"),
    Peer("torchtitan", "torchtitan==0.3.0", "", needs="torchtitan.train"),
]


def python_of(peer: Peer, folder: Path) -> Path:
    """Create a peer's environment once; return its interpreter."""
    if not peer.requirement:
        return Path(sys.executable)
    place = folder / peer.requirement
    python = place / "bin" / "python"
    if not (place / "installed").exists():
        venv.create(place, with_pip=False, clear=True)
        own = next(place.glob("lib/python*/site-packages"))
        base = sysconfig.get_paths()["purelib"]
        (own / "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
        command = [str(python), "-m", "pip", "install", "--quiet", peer.requirement]
        subprocess.run(command, check=True)
        (place / "installed").touch()
    return python


def why_not(peer: Peer, python: Path) -> str:
    """Return why a peer can't run on this CPU; empty if it can."""
    if not peer.needs:
        return ""
    command = [str(python), "-W", "ignore", "-c", f"import {peer.needs}"]
    ran = subprocess.run(command, capture_output=True, text=True, env=_environment(python))
    return "" if ran.returncode == 0 else ran.stderr.strip().splitlines()[-1]


def version_of(peer: Peer, python: Path) -> str:
    package = peer.requirement.partition("==")[0] or {"torchrun": "torch"}.get(peer.name, peer.name)
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def lines_of(peer: Peer) -> int:
    """Return the number of lines that a user writes, excluding blanks, comments and docstrings."""
    text = (SCRIPTS / peer.script).read_text().splitlines()
    return sum(bool(line.strip()) and not line.lstrip().startswith(("#", '"""')) for line in text)


@dataclass(frozen=True)
class Job:
    """Task of a peer, as the arguments of ``small.arguments``."""

    ranks: int = 2
    steps: int = 6
    batch: int = 16
    lr: float = 1e-3
    degree: int = 1
    timeout: float = 1800
    save: Path | None = None
    load: Path | None = None


def command_of(
    peer: Peer, python: Path, job: Job, *, folder: Path, replaced: tuple[str, str] = ("", "")
) -> list[str | Path]:
    """Return the command of a job.

    Args:
        peer: Tool that runs the job.
        python: Interpreter of its environment.
        job: Job to run.
        folder: Folder for its output.
        replaced: Text of the script or of the command, and its replacement.
    """
    if peer is AXONLAUNCH:
        arguments = _command_of_axonlaunch(job, folder)
    else:
        script = folder / peer.script
        script.write_text((SCRIPTS / peer.script).read_text().replace(*replaced))
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"]
        arguments = [python, "-W", "ignore", *(launcher if peer.under_torchrun else ()), script]
        arguments += [f"--{key}={value}" for key, value in vars(job).items() if value is not None]
        arguments += [f"--out={folder / 'seconds'}"]
    return [str(word).replace(*replaced) for word in arguments]


def _command_of_axonlaunch(job: Job, folder: Path) -> list[str | Path]:
    run = job.load or job.save or folder / "run"
    return [
        *(Path(sys.executable).with_name("axonlaunch"), "train", "--config-dir", SCRIPTS),
        *("+experiment=small", f"run_dir={run}", f"launch.nproc={job.ranks}"),
        *(f"train.steps={job.steps}", f"train.global_batch_size={job.batch}"),
        *(f"optimizer.lr={job.lr}", f"strategy.tensor.degree={job.degree}"),
        *(f"launch.timeout_s={job.timeout:g}", f"checkpoint.every={4 if job.save else 0}"),
        *("train.grad_clip=1.0", "train.eval_batches=1"),
    ]


def _environment(python: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(SCRIPTS),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(python.parent.parent / "extensions"),
        **more,
    }


@contextmanager
def started(
    arguments: Sequence[str | Path], python: Path, *, folder: Path, fault: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """Start a command; at the end kill all of its processes."""
    mark = uuid.uuid4().hex
    began = time.time()
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*map(str, arguments)],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env=_environment(python, **{_MARK: mark, "PEERS_FAULT": fault}),
        )
    try:
        yield process, began
    finally:
        _kill_marked(mark)
        process.wait()


def _kill_marked(mark: str) -> None:
    """Kill all processes that inherited a mark; launchers start ranks in separate groups."""
    while pids := [*_marked(mark)]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked(mark: str) -> Iterator[int]:
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            text = f"{_MARK}={mark}".encode()
            if process.name.isdigit() and text in (process / "environ").read_bytes():
                yield int(process.name)


def final_loss(peer: Peer, folder: Path) -> float | None:
    """Return the loss that a job has reported at its end."""
    if peer is AXONLAUNCH:
        file = folder / "summary.json"
        return json.loads(file.read_text())["eval_loss"] if file.exists() else None
    text = (folder / "output").read_text(errors="replace")
    losses = [line.split()[-1] for line in text.splitlines() if line.startswith("final loss ")]
    return float(losses[-1]) if losses else None
