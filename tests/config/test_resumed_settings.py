"""A resumed run reports changed settings, but not new keys of its program."""

from __future__ import annotations

from typing import Any

import pytest

from axonlaunch import config
from axonlaunch.config import flatten, to_tree
from axonlaunch.config.consistency.resumed_settings import settings_unlike_resumed

MODEL = ["model=gpt", "strategy=single"]
GROUPS = "optimizer.groups={'*.bias':{lr:0.5}}"


def frozen(*overrides: str) -> dict[str, Any]:
    return flatten(to_tree(config.load([*MODEL, *overrides])))


def without(settings: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return settings as a version without these keys wrote them."""
    return {key: value for key, value in settings.items() if not key.startswith(keys)}


@pytest.mark.parametrize(
    "key",
    ["optimizer.groups", "optimizer.state_dtype", "model.tie_word_embeddings", "train.grad_clip"],
)
def test_a_key_added_by_an_upgrade_is_no_changed_setting(key: str) -> None:
    now = config.load(MODEL)
    assert key in frozen()
    assert settings_unlike_resumed(now, without(frozen(), key)) == []


def test_a_key_added_by_an_upgrade_is_reported_where_it_is_set() -> None:
    now = config.load([*MODEL, "train.grad_clip=0.25"])
    previous = without(frozen(), "train.grad_clip", "optimizer.groups")
    assert settings_unlike_resumed(now, previous) == ["train.grad_clip=0.25 (was 1.0)"]


@pytest.mark.parametrize("setting", ["train.label_smoothing=0.1", "train.dft=true", "train.eaft=1"])
def test_another_loss_is_reported(setting: str) -> None:
    [changed] = settings_unlike_resumed(config.load([*MODEL, setting]), frozen())
    assert changed.startswith(setting)


@pytest.mark.parametrize("setting", ["adapter.dropout=0.1", "adapter.alpha=8.0"])
def test_another_setting_of_an_adapter_is_reported(setting: str) -> None:
    [changed] = settings_unlike_resumed(
        config.load([*MODEL, "adapter=lora", setting]), frozen("adapter=lora")
    )
    assert changed.startswith(setting)


def test_adapter_settings_that_a_peft_folder_decided_are_no_changed_settings() -> None:
    from_folder = ["adapter=lora", "adapter.path=peft"]
    now = config.load([*MODEL, *from_folder])
    assert settings_unlike_resumed(now, frozen(*from_folder, "adapter.alpha=6.0")) == []


def test_only_the_keys_of_added_or_removed_groups_are_reported() -> None:
    plain, grouped = config.load(MODEL), config.load([*MODEL, GROUPS])
    key = "optimizer.groups.*.bias.lr"
    assert settings_unlike_resumed(grouped, frozen()) == [f"{key}=0.5 (was null)"]
    assert settings_unlike_resumed(plain, frozen(GROUPS)) == [f"{key}=null (was 0.5)"]


def test_another_optimizer_is_reported_with_its_keys() -> None:
    changed = settings_unlike_resumed(config.load([*MODEL, "optimizer=sgd"]), frozen())
    assert "optimizer.name=sgd (was adamw)" in changed
    assert any(line.startswith("optimizer.betas=null (was [") for line in changed)


def test_commit_added_to_a_hub_id_is_no_changed_setting() -> None:
    commits = ["0123456789" * 4, "9876543210" * 4]
    data = ["data=documents", "data.sequence_length=8"]
    now = config.load([*MODEL, *data, "data.files=[team/rows]"])
    previous = frozen(*data, f"data.files=[team/rows@{commits[0]}]")
    assert settings_unlike_resumed(now, previous) == []
    named = config.load([*MODEL, *data, f"data.files=[team/rows@{commits[1]}]"])
    [changed] = settings_unlike_resumed(named, previous)
    assert changed.startswith("data.files=")
