"""A token that a model does not know, where nothing could see that before there was a rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from axonlaunch import config
from axonlaunch.comm import RankFailedError, World
from axonlaunch.config import ConfigError, RunConfig, with_values
from axonlaunch.models import register_model
from axonlaunch.training import worker


class Values(nn.Module):
    """A model that looks at values, so that it can't be tried without."""

    def __init__(self, *, tokens: int = 50, classes: int = 50, positions: int = 8) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(tokens, 4), nn.Embedding(positions, 4)
        self.head = nn.Linear(4, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.min() >= 0
        places = self.positions(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.embed(tokens) + places)
        return logits


def configured(folder: Path, *overrides: str) -> RunConfig:
    register_model("values", inputs="tokens")(Values)
    given = ["model=values", "data=synthetic_tokens", "data.vocab_size=50", "launch.nproc=2"]
    given += ["data.sequence_length=8", "train.global_batch_size=8", "train.eval_batches=0"]
    given += ["checkpoint.every=0", "train.steps=1", "strategy=ddp", *overrides]
    return with_values(config.load(given), {"run_dir": str(folder)})


def failure(chosen: RunConfig) -> BaseException:
    with pytest.raises(RankFailedError) as failed:
        World.mock(2).run(lambda world: worker.run(chosen, world))
    assert failed.value.__cause__ is not None
    return failed.value.__cause__


@pytest.mark.parametrize(
    ("overrides", "what", "knows"),
    [
        ("model.arguments.tokens=3", "token", "embedding has 3"),
        ("model.arguments.classes=4", "target", "outputs have 4"),
    ],
)
def test_a_token_out_of_range_is_named_with_its_sample_and_the_models_size(
    overrides: str, what: str, knows: str, tmp_path: Path
) -> None:
    from axonlaunch import data

    chosen = configured(tmp_path, overrides)
    error = failure(chosen)
    assert isinstance(error, ConfigError)
    said, _, advice = str(error).partition(" is out of range: ")
    key, named, token, _, _, sample = said.split()
    assert (key, named) == ("model:", what)
    assert advice == f"the model's {knows}; the data has 50, make it as many"
    batch = data.build_dataset(chosen.data).samples([int(sample)], split="train")
    assert int(token) in (batch.inputs if what == "token" else batch.targets)


def test_another_index_out_of_range_is_left_as_torch_raised_it(tmp_path: Path) -> None:
    error = failure(configured(tmp_path, "model.arguments.positions=7"))
    assert type(error) is IndexError
