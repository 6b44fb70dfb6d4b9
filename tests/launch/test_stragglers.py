"""The rank that the others wait for is named, unless only its node makes it slow."""

from __future__ import annotations

import io
import re
import threading
import time
from typing import Any

import pytest
from support.command import Command

from axonlaunch.diagnostics.stragglers import Shares, slowest_of
from axonlaunch.diagnostics.wait_detection import waits
from axonlaunch.events import StepLogged, Straggler
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.system.processes.process_state import queued_s

SLOW = """
import os, time
from torch import nn
import axonlaunch as ax

class Slow(nn.Sequential):
    def forward(self, tokens):
        time.sleep(0.1 if os.environ.get("RANK") == "2" else 0.02)
        return super().forward(tokens)

@ax.register_model("slow", inputs="tokens")
def build():
    return Slow(nn.Embedding(256, 16), nn.Linear(16, 256))
"""
BUSY = """
import os, subprocess, sys, time
from torch import nn
import axonlaunch as ax

# Until its parent is gone, on the one core that it inherits.
HOG = "import os; parent = os.getppid()\\nwhile os.getppid() == parent: pass"

class Busy(nn.Sequential):
    def forward(self, tokens):
        done = time.thread_time() + 0.03  # as much work on every rank
        while time.thread_time() < done:
            pass
        return super().forward(tokens)

@ax.register_model("slow", inputs="tokens")
def build():
    if os.environ.get("RANK") == "1":
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        subprocess.Popen([sys.executable, "-c", HOG])
    return Busy(nn.Embedding(256, 16), nn.Linear(16, 256))
"""
RUN = ["plugins=[slow]", "model=slow", "data=synthetic_tokens", "data.sequence_length=16"]
RUN += ["train.global_batch_size=6", "train.eval_batches=0", "train.log_every=12", "name=run"]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_slow_rank_is_named_on_the_console_and_in_the_metrics(
    served: Command, strategy: str
) -> None:
    (served.folder / "slow.py").write_text(SLOW)
    overrides = [*RUN, f"strategy={strategy}", "launch.nproc=3", "train.steps=48"]
    ran = served("train", *overrides)
    reported = [line.get("slowest") for line in served.lines("run")]
    assert reported[0] is None  # too few measurements in the first step
    assert {straggler["rank"] for straggler in reported[2:]} == {2}
    last = reported[-1]
    # On an idle node between 0.8 and 1: load makes the other parts of a step longer.
    assert last["cost"] > 0.2
    assert last["compute"] > 0.3
    kinds = ("data", "compute", "wait", "starved")
    assert sum(last[kind] for kind in kinds) == pytest.approx(1, abs=0.01)
    said = " ".join(ran.stdout.split())
    assert len(re.findall(r"rank 2 on \S+ is slow: the other ranks wait \d\d% of each", said)) == 1


@pytest.mark.slow
def test_rank_on_shared_core_is_not_reported_as_slow(served: Command) -> None:
    (served.folder / "slow.py").write_text(BUSY)
    overrides = [*RUN, "strategy=ddp", "launch.nproc=2", "train.steps=60", "train.log_every=8"]
    ran = served("train", *overrides)
    slowest = [line["slowest"] for line in served.lines("run") if line.get("slowest")]
    assert max(straggler["starved"] for straggler in slowest if straggler["rank"] == 1) > 0.2
    assert "is slow" not in ran.stdout


def test_time_waiting_for_core_is_not_counted_as_work() -> None:
    even = Shares.of([0.0, 0.5, 0.5], queued_s=0.0)
    starved = Shares.of([0.0, 1.0, 0.0], queued_s=0.5)
    assert starved == Shares(data=0.0, compute=0.5, wait=0.0, starved=0.5)
    assert slowest_of([even, starved], ["a", "b"]).cost == 0.0
    slow = slowest_of([even, Shares.of([0.0, 1.0, 0.0], queued_s=0.1)], ["a", "b"])
    assert (slow.rank, slow.host, slow.cost) == (1, "b", 0.4)


def test_a_rank_that_waits_for_data_is_as_slow_as_one_that_computes() -> None:
    even = Shares.of([0.0, 0.3, 0.7], queued_s=0.0)
    slowest = slowest_of([even, Shares.of([0.6, 0.3, 0.1], queued_s=0.0), even], ["a", "b", "c"])
    assert (slowest.rank, slowest.cost, slowest.data) == (1, 0.6, 0.6)


def shown(costs: list[float], *, ranks: list[int] | None = None) -> str:
    """Return the console's output for logged steps with these costs of a slow rank."""
    stream = io.StringIO()
    show = RunConsole(stream=stream)
    step: dict[str, Any] = dict.fromkeys(("loss", "lr", "tokens_per_s", "step_s"), 1.0)
    for number, cost in enumerate(costs):
        rank = ranks[number] if ranks else 1
        slowest = Straggler(
            rank=rank, host="node7", data=0.05, compute=0.9, wait=0.05, starved=0.0, cost=cost
        )
        show(
            StepLogged(
                **step,
                step=number,
                grad_norm=None,
                tokens=1,
                peak_memory_bytes=0,
                epoch=0.1,
                tokens_seen=1,
                slowest=slowest,
            )
        )
    return " ".join(stream.getvalue().split())


def test_a_rank_that_stays_slow_is_reported_once_in_words() -> None:
    said = shown([0.34] * 9)
    assert said.count("is slow") == 1
    assert (
        "note rank 1 on node7 is slow: the other ranks wait 34% of each step for it. It spends 90% "
        "of its time computing and 5% waiting for data."
    ) in said


@pytest.mark.parametrize(
    ("costs", "ranks"),
    [
        ([0.19] * 9, None),
        ([0.5, 0.5, 0.5, 0.1] * 3, None),
        ([0.5] * 9, [0, 1, 2] * 3),
    ],
    ids=["small", "for a while", "now one and now another"],
)
def test_brief_or_cheap_slowness_is_not_reported(
    costs: list[float], ranks: list[int] | None
) -> None:
    assert "is slow" not in shown(costs, ranks=ranks)


def test_thread_wait_time_for_core_is_read_from_system() -> None:
    native = threading.get_native_id()
    queued = queued_s(native)
    assert queued is not None
    time.sleep(0.05)
    after = queued_s(native)
    assert after is not None
    assert after >= queued
    assert queued_s(2**30) is None


@pytest.mark.parametrize(
    ("files", "is_asleep", "expected"),
    [
        (["/x/site-packages/torch/distributed/distributed_c10d.py"], True, True),
        (["/x/torch/_ops.py", "/x/torch/distributed/_functional_collectives.py"], True, True),
        (
            [
                *(
                    "/x/torch/_ops.py",
                    "/x/axonlaunch/planning/tracing/storage_trace.py",
                    "/x/torch/_compile.py",
                ),
                *("/x/torch/_library/autograd.py", "/x/axonlaunch/comm/autograd.py"),
            ],
            True,
            True,
        ),
        (["/x/torch/autograd/graph.py"], True, True),
        (["/x/torch/autograd/graph.py"], False, False),
        (["/home/me/model.py", "/x/torch/distributed/fsdp/fully_shard.py"], True, False),
        (["/x/axonlaunch/data/datasets/loader.py"], True, False),
        (["/x/axonlaunch/training/trainer.py"], True, True),
        ([], True, False),
    ],
)
def test_rank_sleeping_in_communication_counts_as_waiting(
    files: list[str], is_asleep: bool, expected: bool
) -> None:
    assert waits(files, is_asleep=is_asleep) is expected
