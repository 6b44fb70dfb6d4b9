"""Untrusted tokenizers and chat templates that loop, or take all memory, cause one-line errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import corpus

from axonlaunch.config import ConfigError
from axonlaunch.config.options.documents import ChatConfig, DocumentsConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.data import build_dataset
from axonlaunch.data.texts.chats.chat_template import ChatTemplate
from axonlaunch.data.tokenizers import tokenizer

pytest.importorskip("transformers")

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CHAT = {"prompt": "What?", "completion": "That."}
BACKTRACKS = {
    "type": "Split",
    "pattern": {"Regex": "(a+)+b"},
    "behavior": "Isolated",
    "invert": False,
}
MULTIPLIES = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100_000}


@pytest.fixture(autouse=True)
def _short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_LEAST_SECONDS", 3.0)


def change(folder: Path, **parts: Any) -> str:
    file = corpus.save_tokenizer(folder) / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))
    return str(folder)


@pytest.fixture
def chats(tmp_path: Path) -> Callable[[str], Any]:
    """Build a dataset of chats by a template."""

    def build(template: str) -> Any:
        folder = corpus.save_tokenizer(tmp_path / "tokenizer", chat_template=template)
        file = corpus.write_jsonl(tmp_path / "a.jsonl", [CHAT] * 5)
        keys = {"train_on": "all", "held_out": 0, "sequence_length": 8}
        config = ChatConfig(files=[str(file)], cache_dir=str(tmp_path / "cache"), **keys)
        return build_dataset(config, TokenizerConfig(path=str(folder)))

    return build


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("template", [LOOP, "{{ 10 ** (10 ** 9) }}"])
def test_a_chat_template_that_does_not_end_is_an_error_that_names_the_rows(
    template: str, chats: Callable[[str], Any]
) -> None:
    with pytest.raises(ConfigError) as refused:
        chats(template)
    said = str(refused.value)
    assert "tokenizer.path: the chat template, or the tokenizer, took more than 3 s" in said
    assert "a.jsonl, lines 1 to 5)" in said


@pytest.mark.parametrize(
    "template",
    [
        "{{ '%99999999999d' % 1 }}",
        pytest.param("{{ '%300000000d' % 1 }}", marks=pytest.mark.slow),
    ],
)
def test_a_chat_template_that_writes_gigabytes_is_an_error(
    template: str, chats: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "_LEAST_SECONDS", 60.0)
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"line 1: the chat template (writes|rejects)|memory"):
        chats(template)
    assert time.monotonic() - start < 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"pre_tokenizer": BACKTRACKS}, id="regex"),
        pytest.param({"normalizer": MULTIPLIES}, id="replace"),
    ],
)
def test_a_tokenizer_that_backtracks_or_multiplies_is_an_error(
    parts: dict[str, Any], tmp_path: Path
) -> None:
    folder = change(tmp_path / "tokenizer", **parts)
    text = "a" * 1_000_000 + "c"
    file = corpus.write_jsonl(tmp_path / "a.jsonl", [{"text": text}])
    config = DocumentsConfig(files=[str(file)], cache_dir=str(tmp_path / "cache"))
    with pytest.raises(
        ConfigError, match=r"tokenizer.path: the tokenizer (took|failed|ended|need)"
    ):
        build_dataset(config, TokenizerConfig(path=folder))


@pytest.mark.slow
def test_prompts_and_answers_have_a_deadline_too(tmp_path: Path) -> None:
    folder = corpus.save_tokenizer(tmp_path, chat_template=LOOP)
    template = ChatTemplate(
        tokenizer.load_tokenizer(TokenizerConfig(path=str(folder))), marks_assistant=False
    )
    with pytest.raises(ValueError, match="took more than 3 s"):
        template.prompt([{"role": "user", "content": "What?"}])
    with pytest.raises(ValueError, match="took more than 3 s"):
        template.end_of_turn()


def test_a_tokenizer_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    folder = corpus.save_tokenizer(tmp_path)
    with (folder / "tokenizer.json").open("r+b") as stream:
        stream.truncate(5 << 30)
    with pytest.raises(
        ConfigError, match=r"tokenizer.json: can't be read: is larger than \d+ bytes"
    ):
        tokenizer.load_tokenizer(TokenizerConfig(path=str(folder)))


@pytest.mark.slow
@pytest.mark.parametrize("template", [LOOP, "{{ 10 ** (10 ** 9) }}"])
def test_ctrl_c_ends_a_command_whose_chat_template_does_not_end(
    template: str, tmp_path: Path
) -> None:
    folder = corpus.save_tokenizer(tmp_path / "tokenizer", chat_template=template)
    file = corpus.write_jsonl(tmp_path / "a.jsonl", [CHAT])
    keys = [f"data.files=[{file}]", f"tokenizer.path={folder}", f"data.cache_dir={tmp_path}/cache"]
    command = [sys.executable, "-m", "axonlaunch", "data", "prepare", "data=chat", *keys]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True) as process:
        deadline = time.monotonic() + 100
        while not (copies := children(process.pid)):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert process.wait(30) == 130
        assert time.monotonic() - began < 15
    assert not [copy for copy in copies if Path(f"/proc/{copy}").exists()]


def children(pid: int) -> list[int]:
    """Return the processes that any thread of a process started."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found += (thread / "children").read_text().split()
    return [int(child) for child in found]
