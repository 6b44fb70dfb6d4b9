"""Plants each bug of ``mutants.toml`` in a copy of axonlaunch/; reports whether verify finds it.

``python tests/verification/mutants/plant.py [--only TEXT]``, or ``scripts/test --mutants``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SMALL = [
    *("model.hidden_size=32", "model.num_hidden_layers=4", "model.num_attention_heads=4"),
    *("data=synthetic_tokens", "data.sequence_length=16"),
]
SHARE = 0.95
"""Fraction of the bugs that must be found."""


@dataclass(frozen=True)
class Mutant:
    """A bug.

    Attributes:
        claim: Effect of the bug.
        file: Path below axonlaunch/.
        before: Correct code, which occurs once in the file.
        after: Code with the bug.
        verify: Arguments of the command that must find it.
        module: Part of the name of the faulty module, or of the first module that a fault of the
            whole model reaches; ``none`` if no module can be named, such as for a schedule.
    """

    claim: str
    file: str
    before: str
    after: str
    verify: str
    module: str = "none"

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of the command."""
        chosen = shlex.split(self.verify)
        names_model = any(word.startswith("model=") for word in chosen)
        return [*([] if names_model else SMALL), *chosen]


@dataclass(frozen=True)
class Found:
    """The report of verify.

    Attributes:
        verdict: The verdict, ``error``, or ``late`` after the time limit.
        first: The first line that differs.
        module: The first module that differs, and how; empty if none was named.
    """

    verdict: str
    first: str
    module: str = ""


def mutants() -> list[Mutant]:
    content = tomllib.loads((HERE / "mutants.toml").read_text())
    return [Mutant(**table) for table in content["mutant"]]


@contextmanager
def planted(mutant: Mutant, copy: Path) -> Iterator[None]:
    """Plant a bug in a file of the copy, and restore the file afterwards."""
    file = copy / "axonlaunch" / mutant.file
    right = file.read_text()
    if right.count(mutant.before) != 1:
        raise ValueError(f"{mutant.file} has {right.count(mutant.before)} of: {mutant.before}")
    _write(file, right.replace(mutant.before, mutant.after))
    try:
        yield
    finally:
        _write(file, right)


def _write(file: Path, text: str) -> None:
    """Write a file so that Python sees its compiled form is outdated, even within the same
    second.
    """
    later = file.stat().st_mtime + 2
    file.write_text(text)
    os.utime(file, (later, later))


def verify(arguments: list[str], copy: Path, *, seconds: float) -> Found:
    """Run the command on the copy."""
    paths = f"{copy}{os.pathsep}{ROOT / 'tests'}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "axonlaunch", "verify", *arguments, "--json"],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Found("late", f"took more than {seconds:.0f} s")
    try:
        content = json.loads(ran.stdout)
    except json.JSONDecodeError:
        return Found("error", ran.stderr.strip().splitlines()[-1] if ran.stderr else "")
    if "verdict" not in content:
        return Found("error", str(content))
    first = content["failure"] or content["reason"] or next(iter(content["differences"]), "")
    return Found(content["verdict"], first, content.get("first_difference") or "")


def main() -> int:
    """Print a line for each bug; return 0 if enough were found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="those whose claim or file holds this text")
    parser.add_argument("--from", dest="first", type=int, default=0, help="skip those before")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of one command")
    chosen = parser.parse_args()
    every = [m for m in mutants() if chosen.only in m.claim or chosen.only in m.file]
    num_found, named, right, wanted = 0, 0, 0, 0
    passes: dict[tuple[str, ...], bool] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("axonlaunch", "configs"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        for number, mutant in enumerate(every[chosen.first :], start=chosen.first):
            began, arguments = time.monotonic(), tuple(mutant.arguments)
            if arguments not in passes:
                right_code = verify(mutant.arguments, copy, seconds=chosen.seconds)
                passes[arguments] = right_code.verdict == "passed"
            with planted(mutant, copy):
                result = verify(mutant.arguments, copy, seconds=chosen.seconds)
            # A command finds nothing if the correct code does not pass it.
            is_found = passes[arguments] and result.verdict in ("failed", "nothing proved")
            is_named, has_module = bool(result.module), mutant.module != "none"
            is_right = has_module and mutant.module in result.module.partition(":")[0]
            num_found, named = num_found + is_found, named + is_named
            right, wanted = right + is_right, wanted + has_module
            verdict = "found" if is_found else f"NOT FOUND ({result.verdict})"
            if not passes[arguments]:
                verdict = "NOT FOUND (the right code does not pass)"
            if has_module and not is_right:
                verdict += f", {mutant.module} NOT NAMED"
            seconds = time.monotonic() - began
            what = " | ".join(filter(None, (result.module[:120], result.first[:150])))
            print(f"{number:3} {verdict}: {mutant.claim}: {what} [{seconds:.0f} s]", flush=True)
    count = len(every) - chosen.first
    print(
        f"{num_found} of {count} found; a module named of {named}; the right one of {right} of the "
        f"{wanted} in which one is at fault"
    )
    return 0 if num_found >= SHARE * count else 1


if __name__ == "__main__":
    sys.exit(main())
