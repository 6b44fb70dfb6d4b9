"""What the fork server imports depends on the overrides."""

from __future__ import annotations

import subprocess
import sys

import pytest

from axonlaunch.cli.options import preloads

MODULE = "axonlaunch.models.hf.preload"


@pytest.mark.parametrize("word", ["model=hf", "+model=hf", "model.name=hf"])
def test_a_model_of_transformers_is_imported_for_all_ranks_at_once(word: str) -> None:
    assert preloads(["strategy=fsdp", word]) == [MODULE]


@pytest.mark.costly
def test_what_is_imported_for_all_ranks_has_transformers_models_imported() -> None:
    code = f"import sys, {MODULE}; print('transformers.modeling_utils' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"


@pytest.mark.parametrize("overrides", [None, [], ["model=gpt", "data=text"]])
def test_other_models_import_no_more_than_before(overrides: list[str] | None) -> None:
    assert preloads(overrides) == []
