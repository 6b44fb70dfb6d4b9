"""The bytes of a checkpoint are known before training: weights, buffers and optimizer states."""

from __future__ import annotations

import pytest
from support.configured import run_config
from support.rank_engine import rank_engine
from torch.utils._pytree import tree_leaves

import axonlaunch as ax
from axonlaunch.models.facts.parameter_facts import checkpoint_bytes

SMALL = [
    *("data=synthetic_tokens", "data.sequence_length=16", "train.global_batch_size=2"),
    *("model=llama_debug", "model.num_hidden_layers=2", "launch.nproc=1", "launch.backend=mock"),
]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.tie_word_embeddings=true", "optimizer=sgd", "optimizer.momentum=0.9"],
        ["train.param_dtype=bf16", "train.precision=bf16", "optimizer=adafactor"],
        ["train.param_dtype=bf16", "train.precision=bf16", "optimizer.master_weights=fp32"],
        ["adapter=lora", "train.param_dtype=bf16", "train.precision=bf16"],
        ["train.freeze=[layers.*.mlp.*]"],
    ],
    ids=" ".join,
)
def test_checkpoint_bytes_are_those_of_the_saved_state_within_a_percent(
    overrides: list[str],
) -> None:
    config = run_config([*SMALL, *overrides])

    def saved(world: ax.World) -> int:
        engine, loader = rank_engine(config, world)
        engine.train_step(loader.batch(0))
        return sum(tensor.nbytes for tensor in tree_leaves(engine.state_dict()))

    [expected] = ax.World.mock(1).run(saved)
    assert checkpoint_bytes(config) == pytest.approx(expected, rel=0.01)
