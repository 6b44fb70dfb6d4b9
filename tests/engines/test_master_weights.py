"""Weights in 16 bits with masters train like fp32 weights that are rounded for each forward.

With gradients added up in fp32, the results are the same to the bit: torch's gather of fp32 shards
in bf16, and a forward on bf16 copies, round the same numbers at other times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.rank_engine import rank_engine
from torch import Tensor

from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.models.tensors.dtensor_regions import full_tensor
from axonlaunch.training.worker import load_run_state

STEPS = 3
MODEL = [
    *("model=gpt", "model.num_hidden_layers=2", "model.hidden_size=32", "data=synthetic_tokens"),
    *("data.sequence_length=16", "train.global_batch_size=8", "train.grad_clip=0.5"),
    *("scheduler=constant", "optimizer.lr=1e-4", "train.steps=8", "checkpoint.every=0"),
]
BF16 = [*MODEL, "train.precision=bf16"]
MASTERS = [*BF16, "train.param_dtype=bf16", "optimizer.master_weights=fp32"]
FP32_GRADIENTS = "train.grad_dtype=fp32"
LAYOUTS = {
    "single": ["strategy=single", "train.micro_batch_size=4"],
    "ddp": ["strategy=ddp", "launch.nproc=2", "train.micro_batch_size=2"],
    "zero1": ["strategy=zero1", "launch.nproc=2", "train.micro_batch_size=2"],
    "zero2": ["strategy=zero2", "launch.nproc=2"],
    "fsdp": ["strategy=fsdp", "launch.nproc=2", "train.micro_batch_size=2"],
    "hsdp": ["strategy=hsdp", "strategy.fsdp.replicate=2", "launch.nproc=4"],
    "tensor": ["strategy=tensor", "launch.nproc=2"],
    "zero1 tensor": ["strategy=zero1", "strategy.tensor.degree=2", "launch.nproc=4"],
    "pipeline": ["strategy=pipeline", "launch.nproc=2"],
    "pipeline fsdp": ["strategy=pipeline", "strategy.data_parallel=fsdp", "launch.nproc=4"],
    "offloaded": ["strategy=fsdp", "launch.nproc=2", "strategy.fsdp.cpu_offload=optimizer_states"],
}
MATRIX_OPTIMIZERS = {
    "muon, single": ["strategy=single", "optimizer=muon"],
    "muon, fsdp": ["strategy=fsdp", "launch.nproc=2", "optimizer=muon"],
    "muon, zero1 tensor": [*LAYOUTS["zero1 tensor"], "optimizer=muon"],
    "adafactor, fsdp": ["strategy=fsdp", "launch.nproc=2", "optimizer=adafactor"],
    "adafactor, zero1": [*LAYOUTS["zero1"], "optimizer=adafactor"],
    "adafactor, tensor": [*LAYOUTS["tensor"], "optimizer=adafactor"],
}
Trained = tuple[list[float], dict[str, Tensor]]


def full_state(engine: Any) -> dict[str, Tensor]:
    state = {
        k: v for section in ("model", "optimizer") for k, v in engine.state_dict()[section].items()
    }
    return {name: full_tensor(value).clone() for name, value in state.items()}


def train(
    overrides: list[str], *, rounds: bool = False, folder: Path | None = None
) -> list[Trained]:
    """Train some steps; return the losses and the full state of every rank."""
    chosen = run_config(overrides)
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> Trained:
        engine, loader = rank_engine(chosen, world)
        load_run_state(chosen, engine, world)
        if rounds:
            weights = engine.model_state_dict()
            for weight in weights.values():
                weight.copy_(weight.bfloat16())
            engine.load_model_state_dict(weights)
        first = engine.step
        losses = [
            float(engine.train_step(loader.batch(first + step)).loss) for step in range(STEPS)
        ]
        if folder is not None:
            saver = Saver(folder, world=world, retention=Retention(newest=1))
            saver.save(engine.state_dict(), step=STEPS, samples=8 * STEPS)
        return losses, full_state(engine)

    return World.mock(chosen.launch.nproc).run(run)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("layout", [*LAYOUTS, *MATRIX_OPTIMIZERS])
def test_masters_train_as_fp32_weights_computed_in_bf16_to_the_bit(layout: str) -> None:
    overrides = (LAYOUTS | MATRIX_OPTIMIZERS)[layout]
    expected = train([*BF16, *overrides], rounds=True)
    actual = train([*MASTERS, FP32_GRADIENTS, *overrides])
    for (losses, state), (expected_losses, expected_state) in zip(actual, expected, strict=True):
        assert losses == expected_losses
        assert state.keys() == expected_state.keys()
        for name, value in state.items():
            assert torch.equal(value, expected_state[name]), name


def test_masters_keep_changes_that_bf16_weights_lose() -> None:
    overrides = ["strategy=single", "optimizer.lr=1e-6", "optimizer.weight_decay=0"]
    without = [*BF16, "train.param_dtype=bf16"]
    states = [train([*settings, *overrides])[0][1] for settings in (MASTERS, without)]
    start = train([*MASTERS, *overrides, "optimizer.lr=0"])[0][1]
    name = "layers.0.self_attn.q_proj.weight"
    changed = [(state[name].float() != start[name]).float().mean() for state in states]
    assert changed[0] > 0.99
    assert changed[1] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "after"),
    [
        ([*MASTERS, *LAYOUTS["zero1"]], [*MASTERS, *LAYOUTS["fsdp"]]),
        ([*MASTERS, *LAYOUTS["fsdp"]], [*MASTERS, *LAYOUTS["zero1 tensor"]]),
        ([*MASTERS, FP32_GRADIENTS, *LAYOUTS["ddp"]], [*BF16, *LAYOUTS["zero1"]]),
        ([*BF16, *LAYOUTS["fsdp"]], [*MASTERS, FP32_GRADIENTS, *LAYOUTS["pipeline"]]),
    ],
    ids=["zero1 to fsdp", "fsdp to zero1 tensor", "to fp32 weights", "from fp32 weights"],
)
def test_masters_are_resumed_exactly_on_another_layout_and_as_fp32_weights(
    first: list[str], after: list[str], tmp_path: Path
) -> None:
    [(_, expected), *_] = train(first, folder=tmp_path)
    chosen = run_config([*after, f"checkpoint.resume={tmp_path}"])
    assert chosen.launch.nproc != "auto"

    def resume(world: World) -> dict[str, Tensor]:
        engine, _ = rank_engine(chosen, world)
        load_run_state(chosen, engine, world)
        for name, parameter in engine.named_parameters():
            rounded = expected[name].to(parameter.dtype)
            assert torch.equal(full_tensor(parameter), rounded), name
        return full_state(engine)

    for state in World.mock(chosen.launch.nproc).run(resume):
        assert {
            name: value for name, value in state.items() if not torch.equal(value, expected[name])
        } == {}


def test_masters_are_divided_like_optimizer_states() -> None:
    chosen = run_config([*MASTERS, *LAYOUTS["zero1"]])

    def run(world: World) -> tuple[int, int]:
        engine, loader = rank_engine(chosen, world)
        engine.train_step(loader.batch(0))
        weights = sum(parameter.nbytes for _, parameter in engine.named_parameters())
        states: list[Any] = [*engine.optimizer_states()]
        return weights, sum(s.to_local().nbytes if hasattr(s, "to_local") else 0 for s in states)

    for weights, states in World.mock(2).run(run):
        assert states == 3 * weights  # half of 12 bytes per element, of weights with 2


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([*BF16, "optimizer.master_weights=fp32"], "weights are in fp32; use train.param_dtype"),
        ([*MASTERS, "adapter=lora"], "only the adapter is trained"),
        ([*BF16, "train.param_dtype=bf16", FP32_GRADIENTS], "is for the update of masters"),
        (
            [*MODEL, "train.precision=fp16", "train.param_dtype=fp16"],
            "updates of weights in fp16",
        ),
        (
            [
                *MASTERS,
                FP32_GRADIENTS,
                *LAYOUTS["pipeline"],
                "strategy.pipeline.schedule=zbv_zero_bubble",
            ],
            "torch adds up those of zbv_zero_bubble as they are",
        ),
    ],
    ids=["fp32 weights", "adapter", "gradients without masters", "fp16", "zero bubble"],
)
def test_masters_that_a_run_cannot_keep_are_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_config(overrides)
