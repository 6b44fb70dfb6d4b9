"""What a run on text generates when it has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chat_templates
import corpus
import pytest
import torch
from configured import run_config
from torch import Tensor

from axonlaunch.data import build_dataset
from axonlaunch.events import Noted, SampleGenerated
from axonlaunch.training.closing_sample import generate_sample

pytest.importorskip("transformers")

STRICT = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('Who am I?') }}{% endif %}"
SMALL = ["model=llama", "model.hidden_size=16", "model.num_hidden_layers=1", "strategy=single"]
SMALL += ["model.num_attention_heads=2", "model.num_key_value_heads=2", "model.vocab_size=512"]
SMALL += ["data.sequence_length=200", "train.global_batch_size=1", "train.eval_batches=0"]
SMALL += ["data.held_out=0", "launch.nproc=1", "sample.max_new_tokens=5"]


def closing_events(tmp_path: Path, rows: list[Any], template: str, *overrides: str) -> list[Any]:
    """Return what is reported of a model that ends its text with the third token."""
    folder = corpus.save_tokenizer(tmp_path / "tokenizer", chat_template=template)
    file = corpus.write_jsonl(tmp_path / "rows.jsonl", rows)
    files = [f"data.files=[{file}]", f"tokenizer.path={folder}", f"data.cache_dir={tmp_path}"]
    config = run_config([*SMALL, *files, *overrides])
    dataset: Any = build_dataset(config.data, config.tokenizer)
    called: list[int] = []

    def predict(tokens: Tensor) -> Tensor:
        called.append(1)
        said = dataset.tokenizer.end if len(called) == 3 else int(tokens[0, 0])
        following = torch.full_like(tokens, said)
        return torch.nn.functional.one_hot(following, dataset.num_classes).float() * 1e9

    events: list[Any] = []
    generate_sample(config, predict, dataset, report=events.append)
    return events


def test_the_closing_sample_ends_with_the_text(tmp_path: Path) -> None:
    rows = [{"text": "to be or not to be"}] * 4
    [event] = closing_events(tmp_path, rows, chat_templates.CHATML, "data=documents")
    assert isinstance(event, SampleGenerated)
    assert event.text == "def" * 2


def test_a_closing_sample_that_a_chat_template_refuses_is_reported(tmp_path: Path) -> None:
    row = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    rows = [{"messages": [*row, {"role": "assistant", "content": "So."}]}] * 4
    [event] = closing_events(tmp_path, rows, STRICT + chat_templates.CHATML, "data=chat")
    assert isinstance(event, Noted)
    assert event.text.endswith("the chat template refuses it: Who am I?")
