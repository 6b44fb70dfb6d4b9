"""Fields of chats that ``data.fields`` computes by Jinja, as for SQuAD and HellaSwag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import chat_templates, corpus

from axonlaunch.config import ConfigError
from axonlaunch.config.options.documents import ChatConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.data import build_dataset
from axonlaunch.data.datasets.dataset import IGNORE_INDEX

pytest.importorskip("transformers")

SQUAD = {
    "id": "7",
    "context": "Ada wrote notes.",
    "question": "Who wrote?",
    "answers": {"text": ["Ada", "Ada L."], "answer_start": [0, 0]},
}
OF_SQUAD = {
    "prompt": "Context: {{ context }} Question: {{ question }}",
    "completion": "{{ answers.text[0] }}",
}
HELLASWAG = {"ctx": "A man sits.", "endings": ["He eats.", "He flies."], "label": "1"}


def built(folder: Path, rows: list[Any], *, template: str | None = "CHATML", **keys: Any) -> Any:
    text = None if template is None else getattr(chat_templates, template)
    tokenizer = corpus.save_tokenizer(folder / "tokenizer", chat_template=text)
    file = corpus.write_jsonl(folder / "rows.jsonl", rows)
    arguments = {"sequence_length": 256, "packing": "none", "held_out": 0, **keys}
    config = ChatConfig(files=[str(file)], cache_dir=str(folder / "cache"), **arguments)
    return build_dataset(config, TokenizerConfig(path=str(tokenizer)))


def written(dataset: Any) -> tuple[str, str]:
    """Return the text of the first row and its counted text."""
    batch = dataset.samples([0], split="train")
    [counted] = (row[row != IGNORE_INDEX].tolist() for row in batch.targets)
    return dataset.decode(batch.inputs[0].tolist()), dataset.decode(counted)


def test_fields_in_jinja_are_turns_of_a_chat(tmp_path: Path) -> None:
    text, counted = written(built(tmp_path, [SQUAD], fields=OF_SQUAD))
    assert "user\nContext: Ada wrote notes. Question: Who wrote?<|im_end|>" in text
    assert counted.rstrip() == "Ada<|im_end|>"


def test_fields_in_jinja_are_values_of_a_prompt_format(tmp_path: Path) -> None:
    fields = {"completion": "{{ endings[label | int] }}"}
    format_ = {"prompt_format": "{ctx} ", "fields": fields}
    text, counted = written(built(tmp_path, [HELLASWAG], template=None, **format_))
    assert text.startswith("A man sits. He flies.")
    assert counted.startswith("He flies.")


def test_other_text_of_a_computed_field_tokenizes_rows_again(tmp_path: Path) -> None:
    first = built(tmp_path, [SQUAD], fields=OF_SQUAD)
    second = built(tmp_path, [SQUAD], fields={**OF_SQUAD, "completion": "{{ answers.text[1] }}"})
    assert written(first)[1].rstrip() == "Ada<|im_end|>"
    assert written(second)[1].rstrip() == "Ada L.<|im_end|>"


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("{{ answer }}", "data.fields.completion rejects it: 'answer' is undefined; it has id"),
        ("{{ answers.text[2] }}", "rejects it: list object has no element 2; it has id"),
        ("{{ id.__class__.__mro__ }}", "rejects it: access to attribute '__class__' of"),
    ],
)
def test_row_that_a_computed_field_rejects_is_a_bad_row(
    completion: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        built(tmp_path, [SQUAD], fields={**OF_SQUAD, "completion": completion})
    assert reason in str(refused.value)
    assert "rows.jsonl, line 1: " in str(refused.value)


@pytest.mark.parametrize("more", [{}, {"prompt_format": "{question}"}])
def test_computed_field_that_is_no_jinja_is_refused(more: dict[str, str], tmp_path: Path) -> None:
    fields = {"prompt": "question", "completion": "{{ answers.text[0 }}"}
    with pytest.raises(ConfigError) as refused:
        built(tmp_path, [SQUAD], fields=fields, **more)
    [problem] = refused.value.problems
    assert problem.key == "data.fields.completion"
    assert problem.message.startswith("does not compile: ")


@pytest.mark.parametrize("key", ["data.fields.completion", "data.prompt_format"])
def test_endless_constant_of_jinja_is_ended(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jinja computes constants when it compiles a text."""
    monkeypatch.setattr("axonlaunch.data.texts.chats.computed_fields._COMPILE_SECONDS", 1.0)
    endless = "{{ 9**(9**7) }}"
    keys: dict[str, Any] = {"fields": {**OF_SQUAD, "completion": endless}}
    if key == "data.prompt_format":
        keys = {"prompt_format": endless}
    with pytest.raises(ConfigError) as refused:
        built(tmp_path, [SQUAD], **keys)
    [problem] = refused.value.problems
    assert (problem.key, problem.value) == (key, endless)
    assert problem.message == "does not compile: took more than 1 s and was ended"


def test_endless_computed_field_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axonlaunch.data.tokenizers.tokenizer._LEAST_SECONDS", 2)
    loops = "".join(f"{{% for a{n} in range(99999) %}}" for n in range(3))
    endless = f"{loops}{{{{ a0 }}}}" + "{% endfor %}" * 3
    with pytest.raises(Exception, match=r"data\.fields took more than 2 s"):
        built(tmp_path, [SQUAD], fields={**OF_SQUAD, "completion": endless})
