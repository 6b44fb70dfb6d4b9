"""A failing rank is named for any kind of failure; no process is left, and the run resumes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import struct
import time
from itertools import product
from typing import Any

import pytest
from support.command import TINY, Command, wait_for
from support.launchers import By, logged

RUN = ["train", *TINY, "plugins=[fault]", "checkpoint.every=2"]
STRATEGIES = {
    "fsdp": ["strategy=fsdp", "launch.nproc=2"],
    "tensor": ["strategy=tensor", "strategy.tensor.degree=2", "launch.nproc=2"],
    "pipeline": ["strategy=pipeline", "strategy.pipeline.degree=2", "launch.nproc=2"],
}
FAULTS = ("SIGKILL", "SIGSEGV", "SIGSTOP", "exception", "exit", "memory")
PHASES = ("rendezvous", "first", "middle", "saving", "end")
PLUGIN = """
import os, signal
import torch
from axonlaunch.training import trainer, worker
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.engines.mesh_engine import MeshEngine

from pathlib import Path

HERE = Path(__file__).parent
FAULT, RANK, PHASE = (HERE / "fault.txt").read_text().split(":")

def fail():
    if os.environ.get("RANK") != RANK:
        return
    if FAULT == "exception":
        raise ValueError("the fault of a test")
    if FAULT == "memory":
        raise torch.OutOfMemoryError("the fault of a test")
    if FAULT == "exit":
        os._exit(0)
    os.kill(os.getpid(), getattr(signal, FAULT))

def before(owner, name, phase, when=lambda self: True):
    real = getattr(owner, name)
    def wrapped(self, *args, **kwargs):
        if PHASE == phase and when(self):
            fail()
        return real(self, *args, **kwargs)
    setattr(owner, name, wrapped)

if FAULT != "none":
    before(World, "__init__", "rendezvous")
    before(MeshEngine, "backward", "first")
    before(MeshEngine, "backward", "middle", lambda engine: engine.step == 3)
    before(Saver, "save", "saving")
    real = worker.fit
    def fit(*args, **kwargs):
        done = real(*args, **kwargs)
        if PHASE == "end":
            fail()
        return done
    worker.fit = fit
"""


class Faulty:
    """Runs the command with a fault in its ranks."""

    def __init__(self, command: Command) -> None:
        self.command = command
        (command.folder / "fault.py").write_text(PLUGIN)

    def __call__(self, fault: str, *overrides: str, status: int = 0) -> str:
        """Train with a fault; return the output on standard error."""
        self._set(fault)
        return self.command(*overrides, status=status).stderr

    def start(self, fault: str, *overrides: str) -> Any:
        """Start training with a fault."""
        self._set(fault)
        return self.command.start(*overrides)

    def _set(self, fault: str) -> None:
        (self.command.folder / "fault.txt").write_text(fault)


@pytest.fixture
def faulted(served: Command) -> Faulty:
    return Faulty(served)


def reason(fault: str) -> str:
    return {
        "exception": "failed first: ValueError: the fault of a test",
        "memory": "failed first: OutOfMemoryError: the fault of a test",
        "exit": "failed first: exited with status 0 before the end of training",
        "SIGSTOP": "made no progress for 3 s (hang): it is stopped by a signal",
    }.get(fault, f"failed first: killed by {fault}")


def check(faulted: Faulty, strategy: str, fault: str, rank: int, phase: str) -> None:
    command, overrides = faulted.command, [*RUN, *STRATEGIES[strategy]]
    process = faulted.start(f"{fault}:{rank}:{phase}", *overrides, "name=run", "launch.timeout_s=3")
    crash = command.folder / "runs/run/crash.json"
    wait_for(crash.exists, seconds=30)
    # After a report of memory it estimates which changes would fit.
    _, reported = process.communicate(timeout=100 if fault == "memory" else 30)
    assert process.returncode == 1
    assert f"rank {rank} of 2 {reason(fault)}" in reported.replace("\n", " ")
    assert json.loads(crash.read_text())["rank"] == rank
    command.wait_until_gone(seconds=3)
    partial = list((command.folder / "runs/run").glob("checkpoints/*.partial"))
    assert not partial


CASES = [
    ([*STRATEGIES][i % 3], fault, i // 3 % 2, phase)
    for i, (fault, phase) in enumerate(product(FAULTS, PHASES))
]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_rank_at_fault_is_named_and_the_run_continues_from_there(
    faulted: Faulty, case: tuple[str, str, int, str]
) -> None:
    check(faulted, *case)
    strategy = case[0]
    steps = 8 if case[3] == "end" else 6  # at the end all steps were done and saved
    overrides = [*RUN, *STRATEGIES[strategy], f"train.steps={steps}"]
    faulted("none:0:none", *overrides, "name=run")
    assert len(faulted.command.losses("run")) == steps
    assert faulted.command.summary("run")["status"] == "done"


def test_hang_report_names_waiting_and_missing_ranks(served: Command, faulty: list[str]) -> None:
    arguments = "model.arguments={fault:SIGALRM,rank:9,pause:60.0}"  # all ranks sleep
    ran = served("train", *faulty, "launch.timeout_s=3", arguments, status=1)
    assert "rank 0 of 2 made no progress for 3 s (hang): it is in forward" in ran.stderr
    assert "faulty_plugin.py:" in ran.stderr


@pytest.mark.slow
def test_hang_report_names_missed_collective(served: Command) -> None:
    (served.folder / "late.py").write_text(
        "import time\n"
        "import torch, torch.distributed as dist\n"
        "from axonlaunch.engines.mesh_engine import MeshEngine\n"
        "update = MeshEngine.update\n"
        "def late(engine, *args, **kwargs):\n"
        "    if dist.get_rank() == 1:\n"
        "        time.sleep(60)\n"
        "    dist.all_reduce(torch.ones(6))\n"
        "    return update(engine, *args, **kwargs)\n"
        "MeshEngine.update = late\n"
    )
    overrides = [
        "plugins=[late]",
        "strategy=ddp",
        "launch.nproc=2",
        "name=run",
        "launch.timeout_s=3",
    ]
    ran = served.train(*overrides, status=1)
    reported = " ".join(ran.stderr.replace("│", " ").split())
    assert "rank 1 of 2 made no progress for 3 s (hang): it is in late (" in reported
    assert re.search(
        r"rank 0: waiting in all_reduce, called by late \S+: all_reduce \d+ of world \(24 bytes\), "
        "which rank 1 never joined",
        reported,
    )
    dumps = (served.folder / "runs/run/logs").glob("*.flight_record")
    assert sorted(path.name for path in dumps) == ["rank_0.flight_record", "rank_1.flight_record"]


@pytest.mark.slow
def test_out_of_memory_report_has_estimate_and_smaller_settings(
    faulted: Faulty,
) -> None:
    overrides = ["plugins=[fault]", "strategy=ddp", "launch.nproc=2", "name=run"]
    reported = faulted("memory:1:middle", "train", *overrides, status=1)
    reported = " ".join(reported.split())
    assert "hint: the highest rank needs" in reported
    assert "parameters" in reported
    assert "smallest changes that need less: " in reported
    crash = json.loads((faulted.command.folder / "runs/run/crash.json").read_text())
    assert crash["memory_bytes"] > 2**20


@pytest.mark.parametrize(
    ("raised", "hint"),
    [
        (
            "OSError(28, 'No space left on device')",
            "GiB free; free some space, or use another run_dir",
        ),
        ("ModuleNotFoundError('no tokenizers', name='tokenizers')", "tokenizers is not installed"),
    ],
)
def test_failure_report_has_hint(
    served: Command, faulty: list[str], raised: str, hint: str
) -> None:
    plugin = served.folder / "faulty_plugin.py"
    plugin.write_text(plugin.read_text().replace("ValueError('the fault of a test')", raised))
    plugin.write_text(plugin.read_text().replace('ValueError("the fault of a test")', raised))
    ran = served("train", *faulty, "model.arguments={fault:exception}", status=1)
    assert hint in " ".join(ran.stderr.replace("│", " ").split())


@pytest.mark.slow
def test_restarted_run_equals_uninterrupted_run(
    faulted: Faulty,
) -> None:
    command = faulted.command
    plugin = command.folder / "fault.py"
    once = """if os.environ.get("RANK") != RANK or (HERE / "failed").exists():
        return
    (HERE / "failed").touch()
    if False:"""
    plugin.write_text(PLUGIN.replace('if os.environ.get("RANK") != RANK:', once))
    overrides = [*RUN, *STRATEGIES["fsdp"], "launch.max_restarts=2"]
    reported = faulted("SIGKILL:1:middle", *overrides, "name=run")
    assert "rank 1 of 2 failed first: killed by SIGKILL" in reported
    command(*overrides, "name=whole")
    assert command.losses("run") == command.losses("whole")


@pytest.mark.slow
def test_closing_the_terminal_saves_and_leaves_nothing(served: Command, faulty: list[str]) -> None:
    overrides = [*faulty, "checkpoint.every=500", "train.steps=1000", "name=run"]
    process = served.start("train", *overrides, "model.arguments={pause:0.2}")
    logged(served.folder / "runs/run/metrics.jsonl", 2)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert served.summary("run")["status"] == "interrupted"
    assert list((served.folder / "runs/run/checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM"])
def test_signals_to_process_group_are_handled_by_parent(
    axonlaunch: Command, faulty: list[str], name: str
) -> None:
    overrides = [*faulty, "checkpoint.every=500", "train.steps=1000", "model.arguments={pause:0.2}"]
    process = By(axonlaunch.folder, ["setsid"]).start("train", *overrides, "name=run")
    logged(axonlaunch.folder / "runs/run/metrics.jsonl", 2)
    os.killpg(process.pid, getattr(signal, name))
    if name == "SIGHUP":  # the shell signals its jobs, too
        time.sleep(0.05)
        os.killpg(process.pid, signal.SIGHUP)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert axonlaunch.summary("run")["status"] == "interrupted"
    assert list((axonlaunch.folder / "runs/run/checkpoints").iterdir())
    axonlaunch.wait_until_gone(seconds=3)


@pytest.mark.slow
def test_noise_on_rendezvous_port_does_not_harm_run(served: Command, faulty: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    overrides = [*faulty, "strategy=fsdp", "train.steps=30", "name=run"]
    process = served.start(
        "train", *overrides, f"launch.master_port={port}", "model.arguments={pause:0.2}"
    )
    logged(served.folder / "runs/run/metrics.jsonl", 2)
    noise, connections = random.Random(0), []
    for count in range(10_000):
        connection = socket.create_connection(("127.0.0.1", port), timeout=5)
        if count % 3 == 0:
            connection.sendall(noise.randbytes(noise.randint(1, 300)))
        elif count % 3 == 1:  # first the bytes that torch's store expects, then noise
            connection.sendall(struct.pack("<BI", 0, 0x3C85F7CE) + noise.randbytes(64))
        elif len(connections) < 200:
            connections.append(connection)
            continue
        connection.close()
    process.communicate(timeout=60)
    for connection in connections:
        connection.close()
    assert process.returncode == 0
    served("train", *overrides, "name=quiet")
    assert served.losses("run") == served.losses("quiet")


@pytest.mark.slow
def test_64_ranks_start_and_take_their_first_step(axonlaunch: Command) -> None:
    overrides = [word for word in TINY if "global_batch" not in word and "steps" not in word]
    process = axonlaunch.start(
        "train", *overrides, "train.global_batch_size=64", "train.steps=1", "launch.nproc=64"
    )
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
