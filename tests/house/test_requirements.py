"""What is installed for development is locked: each version is in range, each file has a hash."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def _locked(name: str) -> dict[str, list[str]]:
    """Return the locked versions of each package, by environment there may be several."""
    versions: dict[str, list[str]] = {}
    for match in re.finditer(r"^([\w.-]+)==([^ ]+)", _text(name), re.MULTILINE):
        versions.setdefault(match[1].lower(), []).append(match[2])
    return versions


def _text(name: str) -> str:
    return (ROOT / "requirements" / f"{name}.txt").read_text()


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


@pytest.mark.parametrize("name", ["base", "build", *EXTRAS])
def test_every_locked_version_has_hashes_and_names_no_index(name: str) -> None:
    for entry in re.split(r"\n(?=\S)", _text(name).strip()):
        assert re.fullmatch(
            r"[\w.-]+==\S+( ; [^\\]+)? \\(\s+--hash=sha256:[0-9a-f]{64} ?\\?)+", entry
        )


def test_no_build_of_torch_is_locked_for_every_machine() -> None:
    for name in ("base", "build", *EXTRAS):
        assert not re.search(r"^(torch|triton|nvidia-|cuda-)", _text(name), re.MULTILINE)
