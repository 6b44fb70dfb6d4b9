"""A model's source answers for included, library and user code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from axonlaunch.config.options.model import CustomConfig, GPTConfig, HuggingFaceConfig, MoEConfig
from axonlaunch.config.problems.errors import ConfigIssue
from axonlaunch.models.source_of import model_in_folder, source_of

HF = HuggingFaceConfig(path="someone/small", revision="v2")


@dataclass(frozen=True)
class RegisteredConfig:
    """The dataclass of a plug-in's model: it has only the required field."""

    name: str = "registered"


REGISTERED = RegisteredConfig()
CUSTOM = CustomConfig(target="package.module:build")


@pytest.mark.parametrize(
    ("model", "code"),
    [(GPTConfig(), "included"), (HF, "library"), (CUSTOM, "user"), (REGISTERED, "user")],
)
def test_source_knows_who_wrote_the_code_of_a_model(model: Any, code: str) -> None:
    assert source_of(model).code == code


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (GPTConfig(), ConfigIssue("model.name", "fails", "gpt")),
        (REGISTERED, ConfigIssue("model.name", "fails", "registered")),
        (CUSTOM, ConfigIssue("model.target", "fails", "package.module:build")),
        (HF, ConfigIssue("model.path", "fails", "someone/small")),
        (
            HuggingFaceConfig(config={"model_type": "gpt2"}, init="random"),
            ConfigIssue("model.config", "fails", ...),
        ),
    ],
)
def test_problem_of_a_model_has_the_key_that_selects_it(model: Any, problem: ConfigIssue) -> None:
    assert source_of(model).problem("fails") == problem


def test_model_of_a_plugin_without_optional_fields_has_no_weights_and_no_sizes() -> None:
    source = source_of(REGISTERED)
    assert source.initial_weights() is None
    assert source.size("vocab_size") is None
    assert source.scaled_sizes().num_blocks == 0


@pytest.mark.parametrize(("depth", "dense"), [(1, 1), (2, 2), (2, 3)])
def test_a_dense_model_has_no_mixtures_at_another_depth(depth: int, dense: int) -> None:
    model = MoEConfig(num_hidden_layers=depth, first_k_dense_replace=dense)
    for count in range(1, 5):
        changes = source_of(model).with_blocks(count)
        other = replace(model, **{key.removeprefix("model."): n for key, n in changes.items()})
        assert other.num_hidden_layers == count <= other.first_k_dense_replace


def test_initial_weights_are_those_of_the_weights_key_before_those_of_the_folder(
    tmp_path: Any,
) -> None:
    folder = HuggingFaceConfig(path=str(tmp_path))
    assert source_of(folder).initial_weights() == ("model.path", str(tmp_path))
    other = HuggingFaceConfig(path=str(tmp_path), weights="runs/before")
    assert source_of(other).initial_weights() == ("model.weights", "runs/before")
    assert source_of(model_in_folder(tmp_path)).initial_weights() is None
