"""Modules that fully_shard gathers together: blocks, and large ends of a model separately."""

from __future__ import annotations

import pytest
import torch
from support.configured import run_config
from support.rank_engine import rank_engine
from torch.distributed.fsdp import FSDPModule

from axonlaunch.comm import World
from axonlaunch.engines.data_parallel import fsdp

SMALL = [
    *("data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=8"),
    *("model.num_hidden_layers=2", "model.hidden_size=16", "launch.backend=mock"),
]
UNTIED = ["model=llama_debug", "model.tie_word_embeddings=false", *SMALL]
BLOCKS = {"", "layers.0", "layers.1"}


def units(*overrides: str) -> set[str]:
    """Names of the modules with a separate all-gather, on rank 0."""
    chosen = run_config([*overrides, "strategy=fsdp", "launch.nproc=2"])

    def look(world: World) -> set[str]:
        engine, _ = rank_engine(chosen, world)
        [model] = engine.modules
        return {n for n, m in model.named_modules() if isinstance(m, FSDPModule)}

    return World.mock(2).run(look)[0]


def test_small_ends_are_gathered_with_root_parameters() -> None:
    assert units(*UNTIED) == BLOCKS


def test_large_ends_are_gathered_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "LARGE_UNIT", 1)
    assert units(*UNTIED) == {*BLOCKS, "embed_tokens", "norm", "lm_head"}
    assert units(*UNTIED, "train.loss_chunk=4") == {*BLOCKS, "embed_tokens"}


def test_tied_ends_are_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "LARGE_UNIT", 1)
    assert units("model=gpt", *SMALL) == BLOCKS


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    "layout",
    [
        ["strategy=fsdp", "launch.nproc=2"],
        ["strategy=fsdp", "launch.nproc=2", "train.activation_checkpointing=full"],
        ["strategy=zero2", "launch.nproc=2", "train.micro_batch_size=2"],
        ["strategy=fsdp", "strategy.tensor.degree=2", "launch.nproc=4"],
        ["strategy=fsdp", "strategy.pipeline.degree=2", "launch.nproc=4"],
        ["strategy=fsdp", "launch.nproc=2", "train.loss_chunk=4"],
    ],
    ids=" ".join,
)
def test_separate_fsdp_units_for_ends_keep_training_results(
    layout: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is one process of plain tensors, with clipping and updates."""

    def losses(*overrides: str) -> list[float]:
        chosen = run_config([*UNTIED, *overrides])

        def train(world: World) -> list[float]:
            engine, loader = rank_engine(chosen, world)
            return [float(engine.train_step(loader.batch(step)).loss) for step in range(3)]

        ranks = chosen.launch.nproc
        assert isinstance(ranks, int)
        return World.mock(ranks).run(train)[0]

    expected = losses("strategy=single", "launch.nproc=1")
    monkeypatch.setattr(fsdp, "LARGE_UNIT", 1)
    torch.testing.assert_close(losses(*layout), expected, rtol=1e-5, atol=0.0)
