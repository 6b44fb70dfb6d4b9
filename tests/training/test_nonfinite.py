"""Values that are not finite are neither learned from nor saved."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.configured import run_config
from torch import Tensor, nn

import axonlaunch as ax
from axonlaunch.comm import World
from axonlaunch.events import Evaluated, Event, Monitor, StepDone, StepLogged
from axonlaunch.training import worker
from axonlaunch.training.ending.nonfinite import NotFiniteError, raise_if_nonfinite
from axonlaunch.training.loggers.jsonl import JSONLLogger


class DividesInBackward(nn.Module):
    """In some steps its loss is finite but its gradient 0/0, the gradient of the norm of zero.

    With ``in_forward`` the loss is NaN as well.
    """

    def __init__(self, at: int, lasts: int = 1, *, in_forward: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)
        self.at, self.steps, self.in_forward = range(at, at + lasts), 0, in_forward

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        self.steps += self.training
        if self.training and self.steps in self.at:
            zero = (hidden - hidden).pow(2).sum(-1, keepdim=True)
            hidden = hidden + (zero / zero if self.in_forward else zero.sqrt())
        logits: Tensor = self.head(hidden)
        return logits


@pytest.fixture(autouse=True)
def _registered() -> None:
    ax.register_model("divides", inputs="tokens")(DividesInBackward)


def train(folder: Path, *overrides: str, stop_at: int | None = None) -> list[Event]:
    """Train on two ranks of the mock world; return the events that the main rank reported."""
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
    World.mock(2).run(lambda world: worker.run(chosen, world, monitor=monitor))
    return events


def refused(folder: Path, *overrides: str, stop_at: int | None = None) -> str:
    """Return the error message of such a run."""
    with pytest.raises(Exception, match=r"finite|rank") as reported:
        train(folder, *overrides, stop_at=stop_at)
    error = reported.value.__cause__ or reported.value
    assert isinstance(error, NotFiniteError)
    return str(error)


def saved(folder: Path) -> list[str]:
    root = folder / "checkpoints"
    return sorted(path.name for path in root.glob("step_*")) if root.exists() else []


@pytest.mark.parametrize("overrides", [["strategy=ddp"], ["strategy=fsdp", "train.grad_clip=null"]])
def test_nan_gradient_with_finite_loss_is_not_saved(tmp_path: Path, overrides: list[str]) -> None:
    message = refused(tmp_path, "model.arguments.at=4", "checkpoint.every=4", *overrides)
    assert message == (
        "the norm of the gradient of step 4 is not finite; embed.weight is the first parameter "
        "whose gradient is not finite (1 of 3 on its rank)"
    )
    assert saved(tmp_path) == []


def test_nan_parameters_updated_in_backward_are_not_saved(tmp_path: Path) -> None:
    overrides = ["strategy=fsdp", "train.grad_clip=null", "train.optimizer_in_backward=true"]
    message = refused(tmp_path, "model.arguments.at=4", "checkpoint.every=4", *overrides)
    assert message.startswith("after step 4 parameters are not finite; embed.weight is the first ")
    assert saved(tmp_path) == []


def test_nan_parameters_of_unlogged_step_are_not_saved_on_stop(tmp_path: Path) -> None:
    message = refused(tmp_path, "model.arguments.at=3", "checkpoint.every=100", stop_at=2)
    assert message.startswith("after step 3 parameters are not finite; embed.weight is the first ")
    assert saved(tmp_path) == []


FP16 = ["train.precision=fp16", "checkpoint.every=0"]


def test_skipped_fp16_updates_are_logged_with_loss_scale(tmp_path: Path) -> None:
    events = train(tmp_path, *FP16, "model.arguments.at=2", "model.arguments.lasts=3")
    logged = [event for event in events if isinstance(event, StepLogged)]
    assert [(e.step, e.skipped, e.loss_scale) for e in logged] == [(1, 0, 2**16), (8, 3, 2**13)]


def test_fp16_run_fails_after_too_many_skipped_updates(tmp_path: Path) -> None:
    always = ["model.arguments.at=1", "model.arguments.lasts=99", "train.steps=31"]
    message = refused(tmp_path, *FP16, *always)
    assert message.startswith("gradients overflow fp16 in step 31 and in steps before it: updates ")
    assert message.endswith("; use train.precision=bf16, which has the range of fp32")


def test_fp16_run_with_nan_loss_is_not_saved(tmp_path: Path) -> None:
    arguments = ["model.arguments.at=4", "+model.arguments.in_forward=true", "checkpoint.every=4"]
    message = refused(tmp_path, *FP16, *arguments)
    assert message.startswith("the loss of step 4 is nan; ")
    assert saved(tmp_path) == []


def test_nan_on_one_rank_is_refused_by_all_ranks() -> None:
    """Replicas that average parameters have different gradients."""

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


def test_nan_loss_of_one_source_is_null_in_metrics(tmp_path: Path) -> None:
    log = JSONLLogger(tmp_path / "metrics.jsonl", resumed_at=None)
    sources = {"code": math.nan, "text": 0.0}
    log(Evaluated(1, math.nan, eval_tokens=8, unigram_entropy=None, sources=sources))
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["eval_loss"] is None
    assert line["sources"]["code"] == {"eval_loss": None, "perplexity": None}
    assert line["sources"]["text"] == {"eval_loss": 0.0, "perplexity": 1.0}
