"""The script of continuous integration ends with a list of skipped checks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUBS = {
    "scripts/install": "exit 0",
    "scripts/system-packages": "exit 0",
    "scripts/kernels": "exit 0",
    "scripts/chaos": "echo 1 case passed",
    ".venv/bin/ruff": "exit 0",
    ".venv/bin/mypy": "exit 0",
    ".venv/bin/lint-imports": "exit 0",
    ".venv/bin/pip-audit": "exit 0",
}
"""Commands that ``.ci/run`` and ``scripts/check`` start, replaced by ones that take no time."""


@pytest.mark.parametrize(("is_reached", "tests"), [(False, 0), (False, 1), (True, 0)])
def test_a_skipped_pip_audit_is_said_in_the_last_line_of_ci(
    is_reached: bool, tests: int, tmp_path: Path
) -> None:
    for name in (".ci/run", "scripts/check"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    answer = f"exit {0 if is_reached else 1}"
    ran = {"scripts/test": f"echo 7 passed; exit {tests}", ".venv/bin/python": answer}
    for name, command in (STUBS | ran).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o755)
    finished = subprocess.run(
        [tmp_path / ".ci/run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
    )
    last = finished.stdout.splitlines()[-1]
    assert finished.returncode == tests
    assert last.startswith("pip-audit skipped: https://") is not is_reached, finished.stdout
    assert not list(tmp_path.glob("tmp.*"))
