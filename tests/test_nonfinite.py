"""Nothing is learned from, or saved, that is not finite."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configured import run_config
from torch import Tensor, nn

import axonlaunch as ax
from axonlaunch.comm import World
from axonlaunch.events import Event, Monitor, StepDone
from axonlaunch.training import worker
from axonlaunch.training.nonfinite import NotFiniteError, raise_if_nonfinite


class DividesInBackward(nn.Module):
    """In one step its loss is finite and its gradient 0/0: that of the norm of zero."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)
        self.at, self.steps = at, 0

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        self.steps += self.training
        if self.training and self.steps == self.at:
            hidden = hidden + (hidden - hidden).pow(2).sum(-1, keepdim=True).sqrt()
        logits: Tensor = self.head(hidden)
        return logits


@pytest.fixture(autouse=True)
def _registered() -> None:
    ax.register_model("divides", inputs="tokens")(DividesInBackward)


def refused(folder: Path, *overrides: str, stop_at: int | None = None) -> str:
    """Train on two ranks of the mock world; return why that was refused."""
    chosen = run_config(
        [
            *("model=divides", "data=synthetic_tokens", "data.sequence_length=8"),
            *("train.global_batch_size=4", "train.steps=8", "train.log_every=100"),
            *("train.eval_batches=0", "launch.nproc=2", "launch.backend=mock", *overrides),
        ]
    )
    chosen = dataclasses.replace(chosen, run_dir=str(folder))
    events: list[Event] = []

    def stop() -> bool:
        return any(isinstance(e, StepDone) and e.step == stop_at for e in events)

    monitor = Monitor(report=events.append, stop=stop)
    with pytest.raises(Exception, match=r"finite|rank") as reported:
        World.mock(2).run(lambda world: worker.run(chosen, world, monitor=monitor))
    error = reported.value.__cause__ or reported.value
    assert isinstance(error, NotFiniteError)
    return str(error)


def saved(folder: Path) -> list[str]:
    root = folder / "checkpoints"
    return sorted(path.name for path in root.glob("step_*")) if root.exists() else []


@pytest.mark.parametrize("overrides", [["strategy=ddp"], ["strategy=fsdp", "train.grad_clip=null"]])
def test_a_gradient_that_is_no_number_is_not_saved_where_the_loss_is_finite(
    tmp_path: Path, overrides: list[str]
) -> None:
    message = refused(tmp_path, "model.arguments.at=4", "checkpoint.every=4", *overrides)
    assert message == (
        "the norm of the gradient of step 4 is not finite; embed.weight is the first parameter "
        "whose gradient is not finite (1 of 3 on its rank)"
    )
    assert saved(tmp_path) == []


def test_parameters_that_an_unlogged_step_ruined_are_not_saved_by_a_stop(tmp_path: Path) -> None:
    message = refused(tmp_path, "model.arguments.at=3", "checkpoint.every=100", stop_at=2)
    assert message.startswith("after step 3 parameters are not finite; embed.weight is the first ")
    assert saved(tmp_path) == []


def test_all_ranks_refuse_what_one_of_them_computed() -> None:
    """Replicas that average parameters have gradients of their own."""

    def run(world: World) -> str:
        engine: Any = SimpleNamespace(
            step=3,
            gradient_norm=lambda: torch.tensor(math.nan if world.rank else 1.0),
            named_parameters=lambda: iter(()),
            named_updated=lambda: iter(()),
        )
        with pytest.raises(NotFiniteError) as reported:
            raise_if_nonfinite(engine, torch.zeros(()), world=world)
        return str(reported.value)

    first, second = World.mock(2).run(run)
    assert first == second
