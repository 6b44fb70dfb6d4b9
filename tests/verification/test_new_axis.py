"""A new axis of the mesh is an entry of ``config.axes.AXES``: other code needs no change for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import axonlaunch

PACKAGE = Path(axonlaunch.__file__).parent
ADDITIONS = {
    "config/axes.py": {
        "Divided = Literal[": 'Divided = Literal["nothing", ',
        "AXES = (\n": (
            'AXES = (\n    Axis(name="dm", word="dummy", depth=-2, divides="nothing", '
            'ranks="ranks that repeat the same work"),\n'
        ),
    },
    "config/schema.py": {
        "    expert: ExpertConfig =": (
            "    dummy: ContextConfig = field(default_factory=ContextConfig)\n"
            "    expert: ExpertConfig ="
        ),
    },
    "preflight/parallelism.py": {
        '    "tp": tensor_problems,\n': (
            '    "tp": tensor_problems,\n    "dm": lambda config, spec, model: iter(()),\n'
        ),
    },
}
"""Text of each file that is replaced to add an axis whose ranks repeat the same work."""
SMALL = [
    *("model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=4"),
    *("data=synthetic_tokens", "data.sequence_length=16"),
]
LAYOUT = ["strategy=fsdp", "strategy.pipeline.degree=2", "strategy.dummy.degree=2"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the parent folder of a copy of the package with one more axis."""
    folder = tmp_path_factory.mktemp("copy")
    for part in (PACKAGE, PACKAGE.parent / "configs"):
        ignored = shutil.ignore_patterns("__pycache__", "docs")
        shutil.copytree(part, folder / part.name, ignore=ignored)
    for name, replacements in ADDITIONS.items():
        file = folder / "axonlaunch" / name
        text = file.read_text()
        for before, after in replacements.items():
            assert text.count(before) == 1, f"{name}: {before}"
            text = text.replace(before, after)
        file.write_text(text)
    return folder


def _answer(copy: Path, command: str, *overrides: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "axonlaunch", command, *SMALL, *LAYOUT, *overrides, "--json"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


@pytest.mark.slow
def test_ranks_of_a_new_axis_train_like_one_process(copy: Path) -> None:
    result = _answer(copy, "verify", "launch.nproc=4")
    assert result["passed"]
    assert "dummy 2" in result["layout"]


@pytest.mark.slow
def test_estimate_finds_the_stages_inside_a_new_axis(copy: Path) -> None:
    estimate = _answer(copy, "estimate", "launch.nproc=8")
    assert estimate["mesh"]["dm"] == 2
    assert [(rank["coords"]["dm"], rank["coords"]["pp"]) for rank in estimate["ranks"]] == [
        (0, 0),
        (0, 1),
    ]
