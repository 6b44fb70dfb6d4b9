"""``axonlaunch diff``: its output for two traced runs, exit status, and errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from support.command import Command

from axonlaunch.diagnostics.module_trace.files import (
    StepTrace,
    TracedTensor,
    write_step,
)

TRACE = StepTrace(
    step=0,
    arithmetic="fp32",
    layout="tensor 2",
    axes={"tp": 2},
    tensors=(
        TracedTensor("parameter", "head.weight", 0.1, 0.0, 0.3, 64),
        TracedTensor("output", "head", 2.0, 0.0, 6.0),
        TracedTensor("loss", "", 2.0, 2.0, 2.0),
    ),
)
HALF = dataclasses.replace(
    TRACE,
    axes={},
    layout="single",
    tensors=(TRACE.tensors[0], TracedTensor("output", "head", 1.0, 0.0, 3.0), TRACE.tensors[2]),
)


def write(folder: Path, trace: StepTrace, configuration: str = "") -> None:
    write_step(folder, trace)
    if configuration:
        (folder / "config.yaml").write_text(configuration)


def test_diff_of_different_runs_exits_1_with_module_step_and_factor(served: Command) -> None:
    write(served.folder / "a", TRACE, "seed: 0\nstrategy: {tensor: {degree: 2}}\n")
    write(served.folder / "b", HALF, "seed: 0\nstrategy: {tensor: {degree: 1}}\n")
    said = served("diff", "a", "b", status=1).stdout
    assert "a: tensor 2, fp32, steps 0\nb: single, fp32, steps 0\n" in said
    assert "strategy.tensor.degree" in said
    assert (
        "first difference at step 0: head: its output is 2.00 times as large in a as in b, as if"
        in said
    )
    diff = json.loads(served("diff", "a", "b", "--json", status=1).stdout)
    first = diff["first_difference"]
    assert diff["same"] is False
    assert (first["step"], first["module"], first["kind"]) == (0, "head", "output")
    assert first["ratio"] == pytest.approx(2.0)
    assert diff["configuration"] == {"strategy.tensor.degree": ["2", "1"]}


def test_diff_names_first_element_if_both_traced_all(
    served: Command,
) -> None:
    rows = torch.arange(1.0, 13.0).reshape(2, 3, 2)
    for name, elements in (("a", rows), ("b", rows.flip(1))):
        write_step(served.folder / name, TRACE, {("output", "head"): elements})
    said = served("diff", "a", "b", status=1).stdout
    assert "3 tensors compared (1 element by element); tolerance: " in said
    assert "head: its output is off by 0.44 of its size, first at [0, 0, 0]: 1 in a, 5 in b" in said
    assert "(8 of 12 elements)" in said
    diff = json.loads(served("diff", "a", "b", "--json", status=1).stdout)
    assert diff["compared_by_element"] == 1
    assert diff["first_difference"]["elements"] == {
        "first": [0, 0, 0],
        "values": [1.0, 5.0],
        "different": 8,
        "total": 12,
    }
    (served.folder / "b/module_trace/step_0.safetensors").write_bytes(b"corrupt")
    assert served("diff", "a", "b", status=2).stderr.startswith(
        "error: b/module_trace/step_0.safetensors: can't be read as safetensors ("
    )
    write(served.folder / "b", TRACE)  # traced again, without them
    assert "3 tensors compared; tolerance" in served("diff", "a", "b").stdout


def test_diff_of_equal_runs_exits_0(
    served: Command,
) -> None:
    write(served.folder / "a", TRACE, "seed: 0\n")
    write(served.folder / "b", TRACE)
    assert served("diff", "a", "b").stdout.endswith(
        "3 tensors compared; tolerance: 1.0e-05 at step 0\nno differences\n"
    )


def test_diff_of_incomparable_runs_exits_2_with_reasons(served: Command) -> None:
    write(served.folder / "runs/a", TRACE, "seed: 0\n")
    write(served.folder / "later", dataclasses.replace(TRACE, step=5))
    (served.folder / "empty").mkdir()
    assert served("diff", "a", "empty", status=2).stderr == (
        "error: a: there is no such folder; did you mean runs/a?\n"
        "error: empty: no step was traced; train with train.trace.steps=[0]\n"
    )
    assert served("diff", "runs/a", "later", status=2).stderr == (
        "error: runs/a and later: no step is in both: one has 0, the other 5; trace the same "
        "steps with train.trace.steps\n"
    )
