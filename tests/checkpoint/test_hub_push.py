"""Weights uploaded to the Hub, a local server: rights checked before, the model card, failures."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.configured import run_config
from support.hub_server import ORG, READ_ONLY_ORG, READ_TOKEN, TOKEN, USER, Hub, hub_server

import axonlaunch.system.hub
from axonlaunch import checkpoint
from axonlaunch.checkpoint import Checkpoint, Retention
from axonlaunch.checkpoint.exchange import hub_push, weights
from axonlaunch.checkpoint.exchange.model_card import model_card
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import ConfigError, RunConfig, to_yaml, with_values
from axonlaunch.launch.output import summary
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.models.build import build_model
from axonlaunch.models.modules.module_state import model_state

huggingface_hub = pytest.importorskip("huggingface_hub")

TINY = [
    *("model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"),
    *("data=synthetic_tokens", "data.sequence_length=16", "train.global_batch_size=4"),
    *("strategy=single", "checkpoint.every=2", "train.steps=3"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hub_server() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Return the server without repositories, and a user who may write."""
    server.repos.clear()
    server.faults.clear()
    server.use(tmp_path, monkeypatch, token=TOKEN)
    monkeypatch.setattr(axonlaunch.system.hub, "_WAIT_S", 0.0)
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda seconds: None)
    return server


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> RunConfig:
    """Return a run with a checkpoint, whose weights belong to a repository."""
    push = [f"checkpoint.push={ORG}/small", f"run_dir={tmp_path / 'runs' / 'small'}", "name=small"]
    config = run_config([*TINY, *push])
    return saved(config)


def saved(config: RunConfig) -> RunConfig:
    module = build_model(config.model, seed=1)
    folder = Path(config.run_dir)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    origins = {
        "name": "override name=small",
        "model.name": "model/gpt.yaml",
        "strategy.data_parallel": "strategy/fsdp.yaml",
        "data.files": "automatic: override data.files=[team/rows] has [team/rows]",
        "optimizer.lr": "default",
        "loggers": "override loggers=[{name: wandb, key: secret}]",
        "launch.nproc": "override launch.nproc=8",
    }
    (folder / "origins.json").write_text(json.dumps(origins))

    def on_rank(world: World) -> None:
        saver = Saver(folder, world=world, retention=Retention(newest=1))
        saver.save({"model": model_state(module)}, step=3, samples=12, loss=2.5)

    World.mock(1).run(on_rank)
    return config


def newest(config: RunConfig) -> Checkpoint:
    found = checkpoint.latest(Path(config.run_dir))
    assert found is not None
    return found


def refusals(repo: str) -> list[str]:
    return [str(problem) for problem in hub_push.push_problems(repo)]


def test_weights_of_the_last_checkpoint_are_uploaded(run: RunConfig, hub: Hub) -> None:
    assert hub_push.push_run(run) == f"{hub.url}/{ORG}/small"
    files = hub.model(f"{ORG}/small")
    assert {"README.md", "config.json", "model.safetensors"} <= files.keys()
    from safetensors.torch import load

    uploaded = load(files["model.safetensors"])
    expected = dict(build_model(run.model, seed=1).named_parameters())
    assert uploaded.keys() <= expected.keys()
    assert all(torch.equal(uploaded[name], expected[name]) for name in uploaded)
    assert sorted(entry.name for entry in Path(run.run_dir).iterdir()) == [
        *("checkpoints", "config.yaml", "origins.json")
    ]


def test_repository_is_public_by_default_and_private_on_request(run: RunConfig, hub: Hub) -> None:
    hub_push.push_run(run)
    assert hub.repos[f"models/{ORG}/small"].visibility == "public"
    private = {"checkpoint.push": f"{USER}/mine", "checkpoint.push_private": True}
    hub_push.push_run(with_values(run, private))
    assert hub.repos[f"models/{USER}/mine"].visibility == "private"


def test_second_upload_replaces_files_of_the_first(run: RunConfig, hub: Hub) -> None:
    hub_push.push_run(run)
    hub_push.push_run(run)
    assert len(hub.repos[f"models/{ORG}/small"].commits) >= 2


def test_model_card_states_data_losses_and_command_without_secrets(run: RunConfig) -> None:
    card = model_card(newest(run), run, is_adapter=False)
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {"tags": ["axonlaunch"]}
    assert "| base model | none; gpt trained from scratch |" in body
    assert "| training loss | 2.5000 |" in body
    assert "axonlaunch train name=small strategy=fsdp 'data.files=[team/rows]'" in body
    assert "secret" not in card
    assert "launch" not in body.partition("## Command")[2].replace("axonlaunch", "")


def test_model_card_of_an_adapter_names_base_model_and_data_sets(run: RunConfig) -> None:
    from axonlaunch.config.options.adapter import LoraConfig
    from axonlaunch.config.options.documents import DocumentsConfig
    from axonlaunch.config.options.model import HuggingFaceConfig

    commit = "0123456789" * 4
    files = [f"team/rows@{commit}", "/home/me/notes.jsonl"]
    chosen: Any = {
        "model": HuggingFaceConfig(path="org/base"),
        "adapter": LoraConfig(),
        "data": DocumentsConfig(files=files, split="train[:10%]"),
    }
    card = model_card(newest(run), with_values(run, chosen), is_adapter=True)
    head = yaml.safe_load(card.split("---\n")[1])
    assert head == {
        "base_model": "org/base",
        "datasets": ["team/rows"],
        "library_name": "peft",
        "tags": ["axonlaunch"],
    }
    assert f"| data | team/rows@{commit} train[:10%], notes.jsonl |" in card
    assert "/home/me" not in card


@pytest.mark.parametrize(
    ("repo", "reason"),
    [
        ("small", "is not the name of a repository; write ORG/NAME"),
        ("team/a b", "is not the name of a repository; write ORG/NAME"),
        ("team/a--b", "the Hub refuses names above 96 characters, with --"),
        ("others/small", "someone is no member of others; use someone, team, museum"),
        (f"{READ_ONLY_ORG}/small", "someone may only read in museum; ask an administrator"),
    ],
)
def test_names_without_the_right_to_write_are_refused(repo: str, reason: str, hub: Hub) -> None:
    [text] = refusals(repo)
    assert text.startswith("checkpoint.push=")
    assert reason in text


def test_right_to_write_is_enough(hub: Hub) -> None:
    assert refusals(f"{ORG}/small") == refusals(f"{USER}/small") == []


def test_missing_invalid_and_read_only_tokens_are_refused_before_the_start(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*TINY, f"checkpoint.push={ORG}/small"]
    for token, reason in (
        ("", "there is no token of the Hub; log in with hf auth login, or set HF_TOKEN"),
        ("hf_other", "the Hub does not accept this token; log in with hf auth login"),
        (READ_TOKEN, "the token test may only read; make one that may write at http://127.0.0.1"),
    ):
        hub.use(tmp_path, monkeypatch, token=token)
        with pytest.raises(ConfigError, match=f"checkpoint.push={ORG}/small: {reason}"):
            run_config(overrides)
    assert not hub.repos


def test_adapter_that_peft_can_not_store_is_refused_before_the_start(hub: Hub) -> None:
    overrides = [*TINY, f"checkpoint.push={ORG}/small", "adapter=lora"]
    message = (
        f"checkpoint.push={ORG}/small: PEFT adapts models of transformers, and this is gpt; use "
        f"null, and axonlaunch checkpoint export RUN --merge --push {ORG}/small after the run"
    )
    with pytest.raises(ConfigError, match=message):
        run_config(overrides)


def test_command_after_a_failed_upload_keeps_the_repository_private(
    run: RunConfig, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults["/commit/"] = [500]
    private = with_values(run, {"checkpoint.push_private": True})
    assert summary._push(private, RunConsole(stream=io.StringIO()), None) is None
    assert f"--push {ORG}/small --private uploads them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("permissions", "is_refused"), [(["repo.content.read"], True), (["repo.write"], False)]
)
def test_fine_grained_token_needs_the_right_to_write(
    permissions: list[str], is_refused: bool, hub: Hub
) -> None:
    scoped = [{"entity": {"type": "org", "name": ORG}, "permissions": permissions}]
    token = {"role": "fineGrained", "fineGrained": {"global": [], "scoped": scoped}}
    user = {"name": USER, "orgs": [{"name": ORG}], "auth": {"accessToken": token}}
    assert (hub_push._why_refused(f"{ORG}/small", user) is not None) == is_refused


def test_failed_upload_is_one_error_and_leaves_no_files(run: RunConfig, hub: Hub) -> None:
    hub.faults["/commit/"] = [500]
    with pytest.raises(ConfigError, match=r"can't be uploaded: the Hub answered with status 500"):
        hub_push.push_run(run)
    assert not [*Path(run.run_dir).glob("upload-*")]


def test_offline_push_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert refusals(f"{ORG}/small") == [f"checkpoint.push={ORG}/small: HF_HUB_OFFLINE is set"]


def test_export_is_uploaded_only_with_its_card(run: RunConfig, hub: Hub, tmp_path: Path) -> None:
    weights.export_weights(newest(run), run, tmp_path / "out")
    assert not (tmp_path / "out" / "README.md").exists()
