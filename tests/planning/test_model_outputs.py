"""Outputs of custom models are checked against the data before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from axonlaunch import config, data as datasets
from axonlaunch.config import ConfigError
from axonlaunch.config.options.data import SyntheticImagesConfig, SyntheticTokensConfig
from axonlaunch.models import register_model
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.preflight import checks
from axonlaunch.preflight.model_outputs import output_problems

TOKENS = SyntheticTokensConfig(vocab_size=50, sequence_length=8, num_samples=99)
IMAGES = SyntheticImagesConfig(image_size=4, num_classes=10, num_samples=99)
SPEC = ModelSpec(build=lambda config: nn.Identity(), loss=cross_entropy_sum)


class Model(nn.Module):
    """Maps tokens and their positions to logits, in the output format that a test chooses."""

    def __init__(self, *, tokens: int = 50, classes: int = 50, returns: str = "logits") -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(tokens, 4), nn.Embedding(8, 4)
        self.head, self.returns = nn.Linear(4, classes), returns

    def forward(self, tokens: Tensor) -> object:
        if self.returns == "what values decide" and tokens.sum() > 0:
            raise AssertionError("no values here")
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        logits = self.head(x)
        print("nobody has asked")
        return {
            "logits": logits,
            "tuple": (logits, x),
            "object": Outputs(logits),
            "dict": {"logits": logits},
            "what values decide": logits,
        }[self.returns]


@dataclass
class Outputs:
    logits: Tensor


def reported(model: nn.Module, data: object = TOKENS, spec: ModelSpec = SPEC) -> list[str]:
    return [
        problem.message for problem in output_problems(model, spec, datasets.build_dataset(data))
    ]


def on_meta(**options: object) -> Model:
    with torch.device("meta"):
        return Model(**options)  # type: ignore[arg-type] # each test passes the right type


def test_logits_over_vocabulary_are_accepted(capfd: pytest.CaptureFixture[str]) -> None:
    assert reported(on_meta()) == []
    assert reported(on_meta(tokens=60, classes=70)) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ("object", "Outputs, not a tensor; return only the logits, as in return outputs.logits"),
        ("tuple", "tuple, not a tensor; return only the logits, as in return outputs[0]"),
        ("dict", "dict, not a tensor; return only the logits"),
    ],
)
def test_non_tensor_output_is_error_with_advice(returns: str, message: str) -> None:
    assert reported(on_meta(returns=returns)) == [f"its forward returns {message}"]


def test_a_loss_as_output_is_error() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(50, 50), Mean())
    assert reported(model) == [
        "its forward returns a tensor of shape [], not logits [..., 50], from which the run "
        "computes the loss"
    ]


class Mean(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean()


def test_vocabulary_smaller_than_data_is_error_with_sizes() -> None:
    [message] = reported(on_meta(tokens=49))
    assert message == "its embedding embed has 49, but the data has 50 tokens; use 50 or more"
    [message] = reported(on_meta(classes=30))
    assert message == "its outputs have 30, but the data has 50 tokens; use 50 or more"


def test_an_embedding_of_positions_may_be_of_any_size() -> None:
    assert on_meta().positions.num_embeddings < TOKENS.vocab_size
    assert reported(on_meta()) == []


def test_classes_of_images_are_compared_too() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 9))
    assert reported(model, IMAGES) == [
        "its outputs have 9, but the data has 10 classes; use 10 or more"
    ]


def test_custom_loss_allows_outputs_of_any_size() -> None:
    spec = ModelSpec(build=lambda config: nn.Identity(), loss=lambda outputs, targets: outputs)
    assert reported(on_meta(classes=1), spec=spec) == []


def test_value_dependent_model_is_checked_only_by_ranks() -> None:
    assert reported(on_meta(tokens=3, returns="what values decide")) == []


def test_checking_outputs_does_not_change_model() -> None:
    model = on_meta()
    reported(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert not model.embed._forward_pre_hooks


@pytest.mark.parametrize("resolve", [checks.resolve, checks.resolve_anywhere])
def test_every_command_checks_model_outputs_before_start(resolve: object) -> None:
    register_model("returns", inputs="tokens")(Model)
    overrides = ["model=returns", "data=synthetic_tokens", "data.vocab_size=50", "launch.nproc=1"]
    arguments = ["model.arguments.returns=tuple", "data.sequence_length=8"]
    with pytest.raises(ConfigError, match=r"^model.name=returns: its forward returns tuple"):
        resolve(config.load([*overrides, *arguments]))  # type: ignore[operator] # both are functions
