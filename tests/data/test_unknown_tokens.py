"""A token that a model does not know, where nothing could see that before there was a rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from configured import run_config
from torch import Tensor, nn
from torch.utils.data import Dataset

from axonlaunch import config
from axonlaunch.comm import RankFailedError, World
from axonlaunch.config import ConfigError, RunConfig, with_values
from axonlaunch.data.registry import register_dataset
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
    arguments = ["model=values", "data=synthetic_tokens", "data.vocab_size=50", "launch.nproc=2"]
    arguments += ["data.sequence_length=8", "train.global_batch_size=8", "train.eval_batches=0"]
    arguments += ["checkpoint.every=0", "train.steps=1", "strategy=ddp", *overrides]
    return with_values(config.load(arguments), {"run_dir": str(folder)})


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


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of 16 tokens below 50, but for one number in sample 37."""

    num_classes = 50

    def __init__(self, place: int) -> None:
        self.place = place

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(17) * (index + 1) % 50
        if index == 37:
            tokens[self.place] = 60
        return tokens[:-1].clone(), tokens[1:].clone()


@pytest.mark.parametrize(
    ("place", "named"), [(0, "token 60 of sample 37"), (16, "target 60 of sample 37")]
)
@pytest.mark.parametrize("model", ["model=gpt", "model=llama_debug"])
def test_it_is_named_where_ranks_divide_the_vocabulary(
    model: str, place: int, named: str, tmp_path: Path
) -> None:
    settings = [model, "model.vocab_size=50", "model.hidden_size=32", "model.num_hidden_layers=1"]
    register_dataset("sequences")(Sequences)
    settings += [
        "model.num_attention_heads=2",
        "data=sequences",
        f"data.arguments={{place: {place}}}",
    ]
    settings += ["train.global_batch_size=64", "train.steps=4"]
    settings += ["strategy=tensor", "launch.nproc=2", "checkpoint.every=0", "train.eval_batches=0"]
    if model == "model=llama_debug":
        settings += ["model.num_key_value_heads=2", "model.intermediate_size=32"]
    error = failure(with_values(run_config(settings), {"run_dir": str(tmp_path)}))
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"model: {named} is out of range: the model's ")
