"""A run warns if it reads text as bytes for a pretrained model."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.configured import run_config
from support.hf_families import save

from axonlaunch import data
from axonlaunch.training.process.start_notes import data_notes

BYTES = ["data=python_source", "data.sequence_length=16", "train.global_batch_size=4"]


def notes(path: Path, *overrides: str) -> list[str]:
    config = run_config(["model=hf", f"model.path={path}", *BYTES, *overrides])
    return [*data_notes(config, data.build_dataset(config.data, config.tokenizer))]


def test_a_run_of_a_pretrained_model_on_bytes_says_so(tmp_path: Path) -> None:
    save("llama", tmp_path)
    (note,) = notes(tmp_path)
    assert note.startswith("data=python_source: its tokens are bytes")
    assert "data=documents" in note


@pytest.mark.parametrize("overrides", [["model.init=random"], ["data=synthetic_tokens"]])
def test_it_says_nothing_where_the_model_knows_no_tokens_or_gets_no_text(
    overrides: list[str], tmp_path: Path
) -> None:
    save("llama", tmp_path)
    assert notes(tmp_path, *overrides) == []
