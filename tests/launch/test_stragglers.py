"""The rank that the others wait for is named, with what it does meanwhile."""

from __future__ import annotations

import pytest
from command import Command

from axonlaunch.whereabouts import waits

SLOW = """
import os, time
from torch import nn
import axonlaunch as ax

class Slow(nn.Sequential):
    def forward(self, tokens):
        time.sleep(0.06 if os.environ.get("RANK") == "2" else 0.02)
        return super().forward(tokens)

@ax.register_model("slow", inputs="tokens")
def build():
    return Slow(nn.Embedding(256, 16), nn.Linear(16, 256))
"""
RUN = ["plugins=[slow]", "model=slow", "data=synthetic_tokens", "data.sequence_length=16"]
RUN += ["train.global_batch_size=6", "train.eval_batches=0", "train.log_every=12", "name=run"]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_slow_rank_is_named_on_the_console_and_in_the_metrics(
    served: Command, strategy: str
) -> None:
    (served.folder / "slow.py").write_text(SLOW)
    words = [*RUN, f"strategy={strategy}", "launch.nproc=3", "train.steps=60"]
    ran = served("train", *words)
    told = [line.get("slowest") for line in served.lines("run")]
    assert told[0] is None  # too little was seen in the first step
    assert {one["rank"] for one in told[2:]} == {2}
    last = told[-1]
    assert last["cost"] > 0.3
    assert last["compute"] > 0.6
    assert last["data"] + last["compute"] + last["wait"] == pytest.approx(1, abs=0.01)
    assert ran.stdout.count("of the time for rank 2 on ") == 1


@pytest.mark.parametrize(
    ("files", "is_asleep", "expected"),
    [
        (["/x/site-packages/torch/distributed/distributed_c10d.py"], True, True),
        (["/x/torch/_ops.py", "/x/torch/distributed/_functional_collectives.py"], True, True),
        (
            [
                *("/x/torch/_ops.py", "/x/axonlaunch/planning/trace.py", "/x/torch/_compile.py"),
                *("/x/torch/_library/autograd.py", "/x/axonlaunch/comm/differentiable.py"),
            ],
            True,
            True,
        ),
        (["/x/torch/autograd/graph.py"], True, True),
        (["/x/torch/autograd/graph.py"], False, False),
        (["/home/me/model.py", "/x/torch/distributed/fsdp/fully_shard.py"], True, False),
        (["/x/axonlaunch/data/loader.py"], True, False),
        (["/x/axonlaunch/trainer.py"], True, True),
        ([], True, False),
    ],
)
def test_a_rank_waits_for_others_where_it_sleeps_in_code_that_communicates(
    files: list[str], is_asleep: bool, expected: bool
) -> None:
    assert waits(files, is_asleep=is_asleep) is expected
