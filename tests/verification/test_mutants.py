"""All bugs of ``scripts/test --mutants`` can be planted in the current code."""

from __future__ import annotations

import tomllib
from pathlib import Path

import axonlaunch

CONTENT = tomllib.loads((Path(__file__).parent / "mutants" / "mutants.toml").read_text())
PACKAGE = Path(axonlaunch.__file__).parent


def test_each_bug_has_its_place_in_the_code() -> None:
    misplaced = [
        mutant["claim"]
        for mutant in CONTENT["mutant"]
        if (PACKAGE / mutant["file"]).read_text().count(mutant["before"]) != 1
    ]
    assert misplaced == []


def test_there_are_sixty_and_no_two_are_the_same() -> None:
    changes = {(mutant["file"], mutant["before"], mutant["after"]) for mutant in CONTENT["mutant"]}
    assert len(changes) == len(CONTENT["mutant"]) >= 60
