"""A run on chats that have only their rows: its tokenizer, its answers, and resuming it."""

from __future__ import annotations

import json
import os
import pty
import termios
import tty
from typing import TextIO

import pytest
from support import corpus
from support.command import Served
from support.served import Server

from axonlaunch.cli.training.sample import _restored_terminal

pytest.importorskip("transformers")

MODEL = ["model=llama_debug", "model.hidden_size=16", "model.num_hidden_layers=1"]
MODEL += ["model.num_attention_heads=2", "model.num_key_value_heads=2", "model.vocab_size=320"]
DATA = ["data=chat", "data.files=[chats.jsonl]", "data.sequence_length=64", "tokenizer=train"]
DATA += ["tokenizer.vocab_size=320"]
SHORT = ["strategy=single", "launch.backend=mock", "train.global_batch_size=8", "name=chat"]
SHORT += ["train.eval_batches=1"]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Served:
    """Return the command in a folder with a run of an epoch of 49 chats."""
    command = Served(tmp_path_factory.mktemp("runs"), server)
    rows = [{"prompt": f"What is {n} + 1?", "completion": f"{n + 1}."} for n in range(50)]
    corpus.write_jsonl(command.folder / "chats.jsonl", rows)
    command("train", *MODEL, *DATA, *SHORT, "train.epochs=1")
    return command


def test_an_epoch_is_resolved_to_steps_before_the_run_is_frozen(command: Served) -> None:
    run = command.folder / "runs" / "chat"
    assert json.loads((run / "summary.json").read_text())["steps"] == 7
    frozen = (run / "config.yaml").read_text()
    assert "  steps: 7\n" in frozen
    assert "  epochs: null\n" in frozen
    assert (run / "tokenizer" / "tokenizer.json").is_file()


def test_a_model_of_chats_answers_a_prompt_or_each_line(command: Served) -> None:
    overrides = ["--chat", "--prompt", "What is 3 + 1?", "--tokens", "6", "--json"]
    answered = json.loads(command("sample", "runs/chat", *overrides).stdout)["messages"]
    assert [message["role"] for message in answered] == ["user", "assistant"]
    assert answered[0]["content"] == "What is 3 + 1?"
    assert "<|im_" not in answered[1]["content"]
    assert json.loads(command("sample", "runs/chat", "--chat", "--json").stdout) == {"messages": []}


def test_system_message_comes_first_in_a_chat(command: Served) -> None:
    overrides = ["--system", "Count.", "--prompt", "What is 3 + 1?", "--tokens", "2", "--json"]
    answered = json.loads(command("sample", "runs/chat", "--chat", *overrides).stdout)["messages"]
    assert answered[0] == {"role": "system", "content": "Count."}
    error = command("sample", "runs/chat", *overrides, status=2).stderr
    assert error == "error: --system=Count.: is a message of a conversation; add --chat\n"


def interrupted_in_raw_mode(stream: TextIO) -> None:
    with _restored_terminal():
        tty.setraw(stream)
        raise KeyboardInterrupt


def test_ctrl_c_in_a_chat_restores_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    main, terminal = pty.openpty()
    with os.fdopen(main, "rb"), os.fdopen(terminal, "r") as stream:
        monkeypatch.setattr("sys.stdin", stream)
        settings = termios.tcgetattr(stream)
        with pytest.raises(KeyboardInterrupt):
            interrupted_in_raw_mode(stream)
        assert termios.tcgetattr(stream) == settings


def test_more_epochs_resume_with_the_tokenizer_that_was_learned(command: Served) -> None:
    more = command("train", *MODEL, *DATA, *SHORT, "train.epochs=2").stdout
    assert "steps 7 to 13" in more
    corpus.write_jsonl(command.folder / "others.jsonl", [{"prompt": "a", "completion": "b"}] * 60)
    overrides = [*MODEL, *DATA, "data.files=[others.jsonl]", *SHORT, "train.epochs=3"]
    error = command("train", *overrides, status=2).stderr
    assert "tokenizer.name=train: data.files have changed, so training the tokenizer again" in error
    assert "use tokenizer=auto tokenizer.path=runs/chat/tokenizer" in error


def test_fewer_epochs_than_a_run_has_done_are_refused(command: Served) -> None:
    overrides = [*MODEL, *DATA, *SHORT, "train.epochs=0.1"]
    error = command("train", *overrides, status=2).stderr
    assert "error: train.epochs=0.1: " in error
    assert "steps already, but this is 1 steps; use more to continue" in error


def test_a_model_without_a_chat_template_is_not_talked_to(command: Served) -> None:
    small = ["model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
    overrides = ["strategy=single", "launch.backend=mock", "train.steps=1", "train.eval_batches=0"]
    (command.folder / "text.txt").write_text("to be or not to be. " * 60)
    data = ["data=text", "data.files=[text.txt]", "data.sequence_length=16"]
    command("train", *small, *overrides, *data, "name=plain")
    error = command("sample", "runs/plain", "--chat", "--prompt", "a", status=2).stderr
    assert "have no chat template" in error
