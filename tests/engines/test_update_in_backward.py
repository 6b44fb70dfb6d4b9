"""Updates during backward: the results of updates after it, with one gradient at a time."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from support.configured import run_config
from support.rank_engine import rank_engine
from torch import Tensor, nn

from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.config.optimization.optimizer import AdamWConfig
from axonlaunch.engines.optimizer.in_backward import UpdateInBackward
from axonlaunch.models.tensors.dtensor_regions import full_tensor
from axonlaunch.training.worker import load_run_state

DATA = (
    "data=synthetic_tokens data.sequence_length=16 train.global_batch_size=8 train.grad_clip=null "
    "scheduler.warmup_steps=2 train.steps=8 checkpoint.every=0"
)
GPT = f"{DATA} model=gpt model.num_hidden_layers=2 model.hidden_size=32"
MASTERS = "train.precision=bf16 train.param_dtype=bf16 optimizer.master_weights=fp32"
LAYOUTS = {
    "single": f"{GPT} strategy=single",
    "tied masters": f"{GPT} strategy=single {MASTERS} train.grad_dtype=fp32",
    "8bit": f"{GPT} strategy=single optimizer=adamw_8bit model.hidden_size=64",
    "muon": f"{GPT} strategy=single optimizer=muon",
    "adafactor": f"{GPT} strategy=single optimizer=adafactor",
    "adapter": f"{GPT} strategy=single adapter=lora",
    "fsdp": f"{GPT} strategy=fsdp launch.nproc=2 train.precision=bf16",
    "fsdp masters": f"{GPT} strategy=fsdp launch.nproc=2 {MASTERS} optimizer.state_dtype=bf16",
    "hsdp": f"{GPT} strategy=hsdp strategy.fsdp.replicate=2 launch.nproc=4",
    "tensor": f"{GPT} strategy=tensor launch.nproc=2 train.loss_chunk=8",
    "fsdp tensor": f"{GPT} strategy=fsdp strategy.tensor.degree=2 launch.nproc=4",
    "context": f"{GPT} strategy=fsdp strategy.context.degree=2 launch.nproc=2",
    "offloaded": f"{GPT} strategy=fsdp launch.nproc=2 train.activation_checkpointing=offload",
    "on the host": f"{GPT} strategy=fsdp launch.nproc=2 strategy.fsdp.cpu_offload=full {MASTERS}",
    "experts": f"{DATA} model=moe_debug strategy=fsdp strategy.expert.degree=2 launch.nproc=2",
}
IN_BACKWARD = "train.optimizer_in_backward=true"
Trained = tuple[list[float], dict[str, Tensor]]


def train(overrides: list[str], *, steps: int = 3, folder: Path | None = None) -> list[Trained]:
    """Return the losses and the full state of every rank; optionally save it."""
    chosen = run_config(overrides)
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> Trained:
        engine, loader = rank_engine(chosen, world)
        load_run_state(chosen, engine, world)
        first = engine.step
        losses = [
            float(engine.train_step(loader.batch(first + step)).loss) for step in range(steps)
        ]
        state = engine.state_dict()
        if folder is not None:
            saver = Saver(folder, world=world, retention=Retention(newest=1))
            saver.save(state, step=engine.step, samples=8 * engine.step)
        tensors = {**state["model"], **state["optimizer"]}
        return losses, {name: full_tensor(value).clone() for name, value in tensors.items()}

    return World.mock(chosen.launch.nproc).run(run)


def assert_equal(actual: list[Trained], expected: list[Trained]) -> None:
    for (losses, state), (expected_losses, expected_state) in zip(actual, expected, strict=True):
        assert losses == expected_losses
        assert state.keys() == expected_state.keys()
        assert [n for n, value in state.items() if not torch.equal(value, expected_state[n])] == []


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_update_in_backward_equals_update_after_it_to_the_bit(layout: str) -> None:
    overrides = shlex.split(LAYOUTS[layout])
    assert_equal(train([*overrides, IN_BACKWARD]), train(overrides))


@pytest.mark.slow
def test_checkpoint_of_update_in_backward_is_resumed_without_it_and_vice_versa(
    tmp_path: Path,
) -> None:
    sharded, single = (shlex.split(LAYOUTS[layout]) for layout in ("hsdp", "single"))
    expected = train(single, steps=4)
    for number, (first, after) in enumerate(
        [([*single, IN_BACKWARD], single), (single, [*single, IN_BACKWARD])]
    ):
        folder = tmp_path / str(number)
        train(first, steps=2, folder=folder)
        [(losses, state)] = train([*after, f"checkpoint.resume={folder}"], steps=2)
        assert_equal([([*expected[0][0][:2], *losses], state)], expected)
    train([*single, IN_BACKWARD], steps=2, folder=tmp_path / "single")
    resumed = train([*sharded, IN_BACKWARD, f"checkpoint.resume={tmp_path / 'single'}"], steps=2)
    assert resumed[0][0] == pytest.approx(expected[0][0][2:], rel=2e-5)


def test_each_gradient_is_freed_before_the_next_one_exists() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    parameters = dict(model.named_parameters())
    update = UpdateInBackward(AdamWConfig(), parameters)
    existing: list[list[str]] = []

    def note(_: Tensor) -> None:
        existing.append([name for name, p in parameters.items() if p.grad is not None])

    for parameter in parameters.values():
        parameter.register_hook(note)
    initial = {name: p.detach().clone() for name, p in parameters.items()}
    update.begin_backward(rate=lambda peak: peak, step=1)
    model(torch.ones(2, 4)).sum().backward()
    assert existing == [[]] * len(parameters)
    assert all(parameter.grad is None for parameter in parameters.values())
    assert [name for name, p in parameters.items() if torch.equal(p, initial[name])] == []


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("strategy=ddp launch.nproc=2", "strategy.data_parallel=ddp averages gradients in buckets"),
        ("strategy=zero1 launch.nproc=2", "=zero1 averages gradients in buckets when all of them"),
        (
            "strategy=fsdp launch.nproc=2 train.micro_batch_size=1",
            "gradients of 4 micro-batches are added up, so all of them exist; use "
            "train.micro_batch_size=4, or false",
        ),
        (
            "strategy=fsdp launch.nproc=2 optimizer=muon",
            "optimizer=muon may use several parameters, or ranks, in the update of one",
        ),
    ],
)
def test_update_in_backward_of_gradients_that_are_averaged_later_is_refused(
    overrides: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_config([*GPT.split(), *overrides.split(), IN_BACKWARD])
