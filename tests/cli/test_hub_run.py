"""From a hub id to a trained and uploaded model, with a local server in place of the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from support.command import Command
from support.hub_server import ORG, TOKEN, Hub, ServedAtHub, hub_server
from support.served import Server

pytest.importorskip("huggingface_hub")

SMALL = [
    *("model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"),
    *("data=documents", "data.files=[team/rows]", "data.sequence_length=32"),
    *("data.validation_split=test", "train.global_batch_size=4", "checkpoint.every=2"),
    *("strategy=ddp", "launch.backend=mock", "estimate.background=false", "name=small"),
]


def rows(word: str, count: int) -> str:
    return "".join(json.dumps({"text": f"{word} {n} " * 5}) + "\n" for n in range(count))


@dataclass
class AtHub(Command):
    """The command with the server's address, a cache in its folder, and a token."""

    hub: Hub
    more: tuple[tuple[str, str], ...] = ()

    def environment(self) -> dict[str, str]:
        return {
            **super().environment(),
            **self.hub.environment(self.folder, token=TOKEN),
            **dict(self.more),
        }


@pytest.fixture
def at_hub(tmp_path: Path) -> Iterator[AtHub]:
    with hub_server() as hub:
        hub.dataset("team/rows", {"train.jsonl": rows("train", 80), "test.jsonl": rows("test", 8)})
        yield AtHub(tmp_path, hub)


@pytest.mark.slow
def test_hub_id_is_trained_on_uploaded_and_resumed_at_the_same_commit(at_hub: AtHub) -> None:
    commit = at_hub.hub.repos["datasets/team/rows"].revisions["main"]
    push = f"checkpoint.push={ORG}/small"
    ran = at_hub("train", *SMALL, "train.steps=2", push)
    assert f"uploaded to         {at_hub.hub.url}/{ORG}/small" in ran.stdout
    frozen = yaml.safe_load((at_hub.folder / "runs" / "small" / "config.yaml").read_text())
    assert frozen["data"]["files"] == [f"team/rows@{commit}"]
    card = at_hub.hub.model(f"{ORG}/small")["README.md"].decode()
    assert f"| data | team/rows@{commit} |" in card
    assert "'data.files=[team/rows]'" in card

    at_hub.hub.dataset("team/rows", {"train.jsonl": rows("changed", 80)})
    at_hub.hub.asked.clear()
    at_hub.hub.faults["/commit/"] = [403]
    failed = at_hub("train", *SMALL, "train.steps=4", push, status=1)
    assert f"error: checkpoint.push={ORG}/small: can't be uploaded: the Hub refuses it" in (
        failed.stderr
    )
    assert f"axonlaunch checkpoint export runs/small --push {ORG}/small uploads" in failed.stderr
    assert at_hub.summary("small")["status"] == "done"
    assert at_hub.summary("small")["pushed"] is None
    assert not [path for path in at_hub.hub.asked if "datasets" in path]  # the cache has it
    at_hub.hub.faults.clear()
    exported = at_hub("checkpoint", "export", "runs/small", "--push", f"{ORG}/small", "--json")
    assert json.loads(exported.stdout)["pushed"] == f"{at_hub.hub.url}/{ORG}/small"


@pytest.mark.slow
def test_offline_run_is_one_error_at_once(at_hub: AtHub) -> None:
    at_hub.more = (("HF_HUB_OFFLINE", "1"),)
    ran = at_hub("train", *SMALL, status=2)
    assert ran.stderr.splitlines() == [
        "error: data.files=team/rows: is not in the cache of the Hub, and HF_HUB_OFFLINE is set; "
        "where there is a network, run hf download team/rows --repo-type dataset"
    ]
    assert not (at_hub.folder / "runs").exists()
    assert not at_hub.hub.asked


@pytest.mark.slow
def test_chats_in_an_odd_schema_are_trained_on_and_answered(at_hub: AtHub, server: Server) -> None:
    """Two commands from a hub id to a chat with the model, without a script."""
    command = ServedAtHub(at_hub.folder, server, at_hub.hub)
    chats = []
    for n in (number % 50 for number in range(500)):
        said = [("customer", f"What comes after {n}?"), ("agent", f"{n} is followed by {n + 1}.")]
        exchange = [{"by": speaker, "utterance": text} for speaker, text in said]
        chats.append({"case": n, "exchange": exchange})
    fields = "{messages: exchange, role: by, content: utterance, user: customer, assistant: agent}"
    at_hub.hub.dataset("team/chats", {"data/chats.jsonl": "\n".join(map(json.dumps, chats))})
    command(
        *("train", "model=llama_debug", "model.vocab_size=400", "data=chat"),
        *("data.files=team/chats", f"data.fields={fields}"),
        *("tokenizer=train", "tokenizer.vocab_size=400", "data.sequence_length=128"),
        *("train.steps=60", "train.global_batch_size=8", "strategy=single", "name=chat"),
    )
    answered = command("sample", "runs/chat", "--chat", "--prompt", "What comes after 7?")
    assert "is followed by" in answered.stdout
