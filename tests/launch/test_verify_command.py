"""``axonlaunch verify`` in real processes: its output and exit status."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.command import TINY, Command
from support.hf_families import FAMILIES
from support.moe_layouts import EXPERTS, SETTINGS

from axonlaunch.config.problems.errors import plain

# A plugin that breaks the engine of every world of several ranks.
WRONG_NORM = """
import torch.distributed as dist
from axonlaunch.engines import mesh_engine

right = mesh_engine.gradient_norm

def gradient_norm(parameters, **options):
    norm = right(parameters, **options)
    return norm * dist.get_world_size()

mesh_engine.gradient_norm = gradient_norm
"""


def verify(served: Command, *overrides: str, status: int = 0) -> dict[str, Any]:
    ran = served("verify", *TINY, *overrides, "--json", status=status)
    content: dict[str, Any] = json.loads(ran.stdout)
    return content


@pytest.mark.slow
def test_verify_passes_and_prints_differences(served: Command) -> None:
    reported = verify(served, "strategy=tensor", "--steps", "2")
    assert reported["passed"] is True
    assert (reported["layout"], reported["steps"], reported["tolerance"]) == ("tensor 2", 2, 1e-5)
    assert 0 < reported["max_gradient_difference"] < 1e-5
    assert reported["worst_parameter"]
    assert len(reported["losses"]) == 2
    assert reported["differences"] == []
    text = served("verify", *TINY, "strategy=tensor").stdout
    assert text.startswith("tensor 2 vs. single process, 6 steps\n")
    assert text.endswith("passed\n")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("backend", ["gloo", "mock"])
def test_verify_fails_and_names_module(served: Command, backend: str) -> None:
    (served.folder / "wrong_norm.py").write_text(WRONG_NORM)
    overrides = ["strategy=ddp", "plugins=[wrong_norm]", f"launch.backend={backend}"]
    reported = verify(served, *overrides, status=1)
    assert reported["passed"] is False
    assert reported["differences"][0].startswith("step 1: gradient norm is ")


def test_failed_rank_is_verify_verdict_without_traceback(
    served: Command, faulty: list[str]
) -> None:
    overrides = [*faulty, "model.arguments.fault=exception", "launch.backend=gloo"]
    ran = served("verify", *overrides, status=1)
    assert "rank 1 failed: ValueError: the fault of a test" in ran.stdout
    assert ran.stdout.endswith("failed\n")
    assert "Traceback" not in ran.stdout + ran.stderr


def test_a_wrong_configuration_is_reported_as_by_train(served: Command) -> None:
    ran = served("verify", "strategy=tensor", "strategy.tensor.degree=3", status=2)
    assert ran.stderr == (
        "error: strategy.tensor.degree=3: num_attention_heads=4 is not divisible by it; "
        "use 1, 2 or 4\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "ranks", "layout", "backend"),
    [
        ([], 2, "context 2", "mock"),
        ([], 2, "context 2", "gloo"),
        (*(["strategy=tensor"], 4, "context 2 x tensor 2", "mock"),),
        (*(["strategy=pipeline"], 4, "context 2 x pipeline 2 (1f1b)", "gloo"),),
    ],
)
def test_context_ranks_without_data_parallel_ones_train_as_one_process(
    served: Command, overrides: list[str], ranks: int, layout: str, backend: str
) -> None:
    arguments = [*overrides, "strategy.context.degree=2", f"launch.nproc={ranks}"]
    arguments.append(f"launch.backend={backend}")
    reported = verify(served, *arguments, "--steps", "2")
    assert (reported["passed"], reported["layout"]) == (True, layout)
    served.train(*arguments, "name=parts")
    served.train("strategy=single", "name=whole")
    assert served.losses("parts") == pytest.approx(served.losses("whole"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"), [("moe_debug", "zbv-2"), ("moe_debug", "tensor-4"), ("mixtral", "hsdp-2")]
)
def test_divided_experts_in_processes_train_as_one_process(
    served: Command, kind: str, layout: str
) -> None:
    model = SETTINGS
    if kind != "moe_debug":
        config = f"model.config={plain({**FAMILIES[kind], 'num_local_experts': 8})}"
        model = ["model=hf", "model.init=random", config, "data=synthetic_tokens"]
        model = [*model, "data.sequence_length=16", "train.global_batch_size=8"]
    depth = (
        "model.config.num_hidden_layers=4" if kind != "moe_debug" else "model.num_hidden_layers=4"
    )
    ran = served("verify", *model, depth, *EXPERTS[layout], "launch.backend=gloo", "--json")
    reported = json.loads(ran.stdout)
    assert (reported["verdict"], reported["differences"]) == ("passed", [])
    assert "expert" in reported["layout"]
