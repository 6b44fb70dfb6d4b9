"""Every key has a description: its meaning and its possible values."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import pytest
import torch

from axonlaunch import config
from axonlaunch.config import RunConfig
from axonlaunch.config.optimization.optimizer import OPTIMIZERS, OWN_OPTIMIZERS
from axonlaunch.config.optimization.optimizer_states import ParameterFacts
from axonlaunch.config.schema import REGISTRIES
from axonlaunch.config.validation.key_reference import Key, reference
from axonlaunch.engines.optimizer.step import Update

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

    theirs: Any = Theirs()
    reported = described(replace(config.load([]), model=theirs))
    assert reported["model.size"].meaning == "how large it is"
    assert reported["model.silent"].meaning == ""


def states_after_a_step(name: str, *, weight_decay: float) -> dict[str, torch.Tensor]:
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5]]))
    facts = ParameterFacts(name="p", shape=(2, 2), is_hidden_matrix=True)
    optimizer = OPTIMIZERS.config(name)(weight_decay=weight_decay)
    update = Update(optimizer, {"p": weight}, parameters={"p": facts})
    weight.grad = torch.tensor([[0.5, 1.0], [-1.0, 0.25]])
    update.apply(rate=lambda peak: peak)
    return update.state_dict()


@pytest.mark.parametrize("name", sorted(OWN_OPTIMIZERS))
def test_the_text_of_weight_decay_says_whether_it_is_decoupled(
    name: str, chosen: RunConfig
) -> None:
    """Decoupled decay does not change the optimizer's states; an L2 penalty does.

    A dataclass that inherits from another one also inherits its texts, even if they are false.
    """
    optimizer = OPTIMIZERS.config(name)()
    text = described(replace(chosen, optimizer=optimizer))["optimizer.weight_decay"].meaning
    decayed = states_after_a_step(name, weight_decay=0.25)
    without = states_after_a_step(name, weight_decay=0.0)
    is_decoupled = all(torch.equal(decayed[key], without[key]) for key in decayed)
    assert ("decoupled" in text) == is_decoupled
    assert ("L2 penalty" in text) != is_decoupled
