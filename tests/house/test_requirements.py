"""Tests that requirements.lock locks every dependency: a version in range, hashes of all files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# Pairs of (sets that need it, requirement lines).
ENTRIES: list[tuple[str, str]] = re.findall(
    r"^# ([\w ]+)\n(\S(?:.*\n)+?)(?=#|\Z)", (ROOT / "requirements.lock").read_text(), re.MULTILINE
)


def _locked(name: str) -> dict[str, list[str]]:
    """Return the locked versions of each package in a set; markers can select among several."""
    versions: dict[str, list[str]] = {}
    for sets, entry in ENTRIES:
        if name in sets.split():
            package, version = entry.split()[0].split("==")
            versions.setdefault(package.lower(), []).append(version)
    return versions


def _direct(extra: str) -> list[Requirement]:
    wanted = [Requirement(name) for name in (*PROJECT["dependencies"], *EXTRAS.get(extra, []))]
    nested = [extra for r in wanted if r.name == "axonlaunch" for extra in r.extras]
    wanted += [Requirement(name) for extra in nested for name in EXTRAS[extra]]
    return [r for r in wanted if r.name != "axonlaunch"]


@pytest.mark.parametrize("extra", ["base", *EXTRAS])
def test_every_requirement_is_locked_within_its_range(extra: str) -> None:
    locked = _locked(extra) | _locked("torch")
    for requirement in _direct(extra):
        versions = locked[requirement.name.lower()]
        assert all(requirement.specifier.contains(version) for version in versions), requirement


def test_every_locked_version_has_hashes_and_names_no_index() -> None:
    assert sum(len(entry.splitlines()) for _, entry in ENTRIES) > 1000
    for sets, entry in ENTRIES:
        assert sets == "torch" or re.fullmatch(
            r"[\w.-]+==\S+( ; [^\\]+)? \\(\s+--hash=sha256:[0-9a-f]{64} ?\\?)+\s", entry
        )


def test_no_build_of_torch_is_locked_for_every_machine() -> None:
    of_torch = [e for _, e in ENTRIES if re.match(r"(torch=|triton|nvidia-|cuda-)", e)]
    assert [entry.count("\n") for entry in of_torch] == [1]
    assert re.fullmatch(r"torch==[\d.]+\n", of_torch[0])
