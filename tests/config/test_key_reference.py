"""Every key has a description: its meaning and its possible values."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import pytest

from axonlaunch import config
from axonlaunch.config import RunConfig
from axonlaunch.config.schema import REGISTRIES
from axonlaunch.config.validation.key_reference import Key, reference

VARIANTS = [
    (group, kind) for group, registry in REGISTRIES.items() for kind in registry.configs().values()
]


@pytest.fixture(scope="module")
def chosen() -> RunConfig:
    """Return a run with all groups. Composing it takes longer than reading it."""
    return config.load(["hardware=h200", "adapter=lora"])


def described(chosen: RunConfig) -> dict[str, Key]:
    return {key.name: key for key in reference(chosen)}


def test_every_key_of_a_configuration_is_there(chosen: RunConfig) -> None:
    assert described(chosen).keys() == config.flatten(chosen).keys()


@pytest.mark.parametrize(("group", "kind"), VARIANTS)
def test_no_key_is_without_a_meaning(group: str, kind: type, chosen: RunConfig) -> None:
    needed: dict[str, Any] = {
        spec.name: None for spec in fields(kind) if spec.default is spec.default_factory is MISSING
    }
    changed = replace(
        chosen,
        **{group: [kind(**needed)] if group == "loggers" else kind(**needed)},
    )
    assert [key.name for key in reference(changed) if not key.meaning] == []


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("train.steps", "whole number, at least 1 | auto"),
        ("train.grad_clip", "number, above 0 | null"),
        ("train.precision", "auto | fp32 | bf16 | fp16"),
        ("train.compile", "true | false"),
        ("train.micro_batch_size", "whole number, at least 1 | auto"),
        ("plugins", "list of text, or one text"),
        ("strategy.pipeline.split", "list of whole number | auto"),
        ("strategy.tensor.plan", "keys, each with text"),
        ("hardware", "a group of keys | null"),
    ],
)
def test_key_types_are_described_in_words(key: str, allowed: str) -> None:
    assert described(config.load([]))[key].allowed == allowed


def test_a_meaning_is_the_text_below_the_field() -> None:
    @dataclass
    class Theirs:
        size: int = 3
        """how large
        it is
        """
        silent: int = 4

    user_config: Any = Theirs()
    reported = described(replace(config.load([]), model=user_config))
    assert reported["model.size"].meaning == "how large it is"
    assert reported["model.silent"].meaning == ""
