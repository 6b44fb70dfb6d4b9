"""The training loop: logging, evaluation, saving, stopping."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import run_config

from axonlaunch import checkpoint
from axonlaunch.checkpoint.format import step_folders
from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.data.datasets.dataset import AnyBatch, Batch
from axonlaunch.data.datasets.loader import Loader
from axonlaunch.engines import mesh_engine
from axonlaunch.engines.optimizer import clipping
from axonlaunch.events import (
    Evaluated,
    Event,
    Finished,
    Monitor,
    Noted,
    Saved,
    Started,
    StepLogged,
)
from axonlaunch.training import worker
from axonlaunch.training.ending.early_stop import EvaluationHistory
from axonlaunch.training.loggers.jsonl import JSONLLogger

TINY = ["model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
TINY += ["data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=8"]
TINY += ["data.num_eval_samples=19", "checkpoint.every=0"]


def configured(folder: Path, *overrides: str, ranks: int = 2) -> RunConfig:
    chosen = run_config([*TINY, f"launch.nproc={ranks}", "strategy=ddp", *overrides])
    return dataclasses.replace(chosen, run_dir=str(folder))


def train(folder: Path, *overrides: str, ranks: int = 2, stop_at: int | None = None) -> list[Event]:
    """Train on the mock world and return the events that the main rank reported."""
    chosen = configured(folder, *overrides, ranks=ranks)
    folder.mkdir(exist_ok=True)
    events: list[Event] = []

    def stop() -> bool:
        steps = [e.step for e in events if isinstance(e, StepLogged)]
        return stop_at is not None and bool(steps) and steps[-1] >= stop_at

    monitor = Monitor(report=events.append, stop=stop)
    World.mock(ranks).run(lambda world: worker.run(chosen, world, monitor=monitor))
    return events


def of(kind: type, events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_the_first_every_nth_and_the_last_step_are_logged(tmp_path: Path) -> None:
    events = train(tmp_path, "train.steps=7", "train.log_every=3")
    assert [event.step for event in of(StepLogged, events)] == [1, 3, 6, 7]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 3, 6, 7]
    assert all(line["tokens"] == 64 for line in lines if "loss" in line)


def test_checkpoint_has_only_evaluation_loss_of_its_step(tmp_path: Path) -> None:
    overrides = ["train.steps=7", "train.eval_every=2", "train.eval_batches=1"]
    events = train(tmp_path, *overrides, "checkpoint.every=3", "checkpoint.keep_last=9")
    evaluated = {event.step: event.eval_loss for event in of(Evaluated, events)}
    saved = {c.step: c.eval_loss for c in checkpoint.list_checkpoints(tmp_path)}
    assert saved == {3: None, 6: evaluated[6], 7: evaluated[7]}


def test_evaluation_counts_every_held_out_target_once(tmp_path: Path) -> None:
    """19 samples in global batches of 8 on 4 ranks: the last batch is padded, without counting
    padding.
    """
    overrides = ["train.steps=4", "train.eval_every=2", "train.eval_batches=100"]
    many = of(Evaluated, train(tmp_path / "many", *overrides, ranks=4))
    single = of(Evaluated, train(tmp_path / "one", *overrides, "strategy=single", ranks=1))
    assert [event.step for event in many] == [2, 4]
    assert {event.eval_tokens for event in many + single} == {19 * 8}
    assert [e.eval_loss for e in many] == pytest.approx([e.eval_loss for e in single], rel=1e-5)


def test_evaluation_batches_and_saved_tensors_count_as_progress(tmp_path: Path) -> None:
    chosen = configured(
        tmp_path, "train.steps=1", "train.eval_batches=3", "checkpoint.every=1", ranks=1
    )
    phases: list[str] = []
    monitor = Monitor(report_phase=lambda phase, *, step: phases.append(phase))
    World.mock(1).run(lambda world: worker.run(chosen, world, monitor=monitor))
    assert phases.count("evaluating") == 3
    assert phases.count("saving") > 10  # weights and two states of each


def test_no_evaluation_with_zero_eval_batches(tmp_path: Path) -> None:
    assert not of(Evaluated, train(tmp_path, "train.steps=2", "train.eval_batches=0"))


def test_checkpoints_are_saved_every_n_steps_and_at_end(tmp_path: Path) -> None:
    overrides = ["train.steps=5", "checkpoint.every=2", "checkpoint.keep_last=2"]
    saved = of(Saved, train(tmp_path, *overrides))
    assert [event.step for event in saved] == [2, 4, 5]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_4", "step_5"]


def test_stop_request_stops_all_ranks_after_same_step(tmp_path: Path) -> None:
    overrides = ["train.steps=9", "train.log_every=1", "checkpoint.every=100"]
    events = train(tmp_path, *overrides, stop_at=3)
    finished = of(Finished, events)[0]
    assert finished.interrupted
    assert finished.step < 9
    assert [event.step for event in of(Saved, events)] == [finished.step]


def test_a_run_that_saves_nothing_stops_without_a_checkpoint(tmp_path: Path) -> None:
    events = train(tmp_path, "train.steps=9", "train.log_every=1", stop_at=2)
    assert of(Finished, events)[0].interrupted
    assert not of(Saved, events)


def test_resumed_run_logs_each_step_once(tmp_path: Path) -> None:
    overrides = ["train.log_every=1", "checkpoint.every=2", "train.eval_batches=0"]
    train(tmp_path, *overrides, "train.steps=4", "scheduler=constant")
    lines = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 5, "loss": 0.0}\n{"step": 6, "lo')
    events = train(tmp_path, *overrides, "train.steps=6", "scheduler=constant")
    assert of(Started, events)[0].step == 4
    assert of(Started, events)[0].resumed_from.endswith("step_4")
    lines = (tmp_path / "metrics.jsonl").read_text()
    steps = [json.loads(line)["step"] for line in lines.splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_run_continues_if_checkpoint_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {tmp_path / "checkpoints/step_1": PermissionError(13, "Permission denied")}
    monkeypatch.setattr(step_folders, "prune", lambda *_: left)
    events = train(tmp_path, "train.steps=3", "checkpoint.every=1", "checkpoint.keep_last=1")
    assert of(Finished, events)[0].step == 3
    [note] = of(Noted, events)
    assert note.text.startswith(f"{tmp_path}/checkpoints/step_1 is not kept and could not be ")


def test_the_norm_of_a_gradient_is_computed_once_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms: list[float] = []
    of_parameters = mesh_engine.gradient_norm

    def norm(*arguments: Any, **others: Any) -> torch.Tensor:
        value = of_parameters(*arguments, **others)
        norms.append(float(value))
        return value

    for module in (clipping, mesh_engine):
        monkeypatch.setattr(module, "gradient_norm", norm)
    events = train(tmp_path, "train.steps=5", "train.log_every=2", "train.grad_clip=0.1", ranks=1)
    logged = [event.grad_norm for event in of(StepLogged, events)]
    assert len(norms) == 5
    assert logged == [norms[0], norms[1], norms[3], norms[4]]


def test_never_resuming_starts_at_the_first_step(tmp_path: Path) -> None:
    train(tmp_path, "train.steps=2", "checkpoint.every=2")
    events = train(tmp_path, "train.steps=2", "checkpoint.resume=never")
    assert of(Started, events)[0].step == 0


def test_a_run_with_the_largest_seed_trains(tmp_path: Path) -> None:
    events = train(tmp_path, "train.steps=2", "train.eval_batches=1", f"seed={2**63 - 1}")
    assert of(Finished, events)[0].step == 2


def test_custom_model_dropout_is_reproduced_after_resume(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    overrides = ["plugins=[dropout_plugin_of_a_test]", "model=with_dropout", *TINY[3:]]
    (tmp_path / "dropout_plugin_of_a_test.py").write_text(
        "from torch import nn\n"
        "from axonlaunch import register_model\n"
        "@register_model('with_dropout', inputs='tokens')\n"
        "def build():\n"
        "    return nn.Sequential(nn.Embedding(256, 8), nn.Dropout(0.5), nn.Linear(8, 256))\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        overrides += ["launch.nproc=2", "strategy=ddp", "train.log_every=1", "checkpoint.every=2"]
        overrides += ["scheduler=constant", "train.eval_batches=0"]

        def losses(folder: Path, steps: int) -> list[float]:
            chosen = run_config([*overrides, f"train.steps={steps}"])
            chosen = dataclasses.replace(chosen, run_dir=str(folder))
            events: list[Event] = []
            World.mock(2).run(
                lambda world: worker.run(chosen, world, monitor=Monitor(report=events.append))
            )
            return [event.loss for event in of(StepLogged, events)]

        full = losses(tmp_path / "whole", 4)
        (tmp_path / "parts").mkdir()
        in_two_runs = losses(tmp_path / "parts", 2) + losses(tmp_path / "parts", 4)
    assert in_two_runs == full


def test_unequal_micro_batch_token_counts_weigh_like_one_batch() -> None:
    from axonlaunch.engines.build import build_engine

    def loss_and_norm(*overrides: str) -> tuple[float, float]:
        chosen = run_config([*TINY, "launch.nproc=1", "strategy=single", *overrides])
        tokens = torch.arange(64).view(8, 8) % 256
        targets = tokens.clone()
        targets[0, :7] = -100
        targets[5] = -100

        def run(world: World) -> tuple[float, float]:
            result = build_engine(chosen, world).train_step(Batch(tokens, targets))
            assert result.grad_norm is not None
            return float(result.loss), float(result.grad_norm)

        return World.mock(1).run(run)[0]

    full, accumulated = loss_and_norm(), loss_and_norm("train.micro_batch_size=1")
    assert accumulated == pytest.approx(full, rel=1e-6)


def test_throughput_counts_only_counted_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Loader.batch

    def shortened(loader: Loader, step: int) -> AnyBatch:
        batch = full(loader, step)
        assert isinstance(batch, Batch)
        targets = batch.targets.clone()
        targets[:, 2 * step + 2 :] = -100
        return dataclasses.replace(batch, targets=targets)

    monkeypatch.setattr(Loader, "batch", shortened)
    events = train(tmp_path, "train.steps=4", "train.log_every=100", "train.eval_batches=0")
    first, last = of(StepLogged, events)
    assert (first.tokens_seen, first.tokens) == (8 * 2, 8 * 2)
    assert first.tokens_per_s * first.step_s == pytest.approx(first.tokens)
    assert (last.tokens_seen - first.tokens_seen, last.tokens) == (8 * (4 + 6 + 8), 8 * 8)
    seconds = 3 * last.step_s
    assert last.tokens_per_s * seconds == pytest.approx(last.tokens_seen - first.tokens_seen)
    assert of(Finished, events)[0].tokens_per_s == pytest.approx(last.tokens_per_s)


def test_metrics_take_no_event_without_numbers(tmp_path: Path) -> None:
    write = JSONLLogger(tmp_path / "metrics.jsonl", resumed_at=None)
    write(Saved(step=1, path="x", seconds=0.1, stalled_s=0.1))
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_tokens_seen_and_epochs_are_counted_across_a_resume(tmp_path: Path) -> None:
    overrides = [
        "train.log_every=2",
        "checkpoint.every=2",
        "data.num_samples=20",
        "scheduler=constant",
    ]
    overrides += ["train.eval_batches=0"]
    train(tmp_path, *overrides, "train.steps=2")
    events = train(tmp_path, *overrides, "train.steps=6")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["tokens_seen"], line["epoch"]) for line in lines] == [
        (1, 64, 0.4),
        *((step, 64 * step, step * 8 / 20) for step in (2, 3, 4, 6)),
    ]
    assert of(StepLogged, events)[-1].tokens_seen == 6 * 64


def test_evaluation_before_first_step_if_configured(tmp_path: Path) -> None:
    events = train(tmp_path, "train.steps=2", "train.eval_at_start=true", "train.eval_batches=1")
    evaluated = of(Evaluated, events)
    assert [event.step for event in evaluated] == [0, 2]
    assert evaluated[0].perplexity == pytest.approx(math.exp(evaluated[0].eval_loss))


STILL = ["train.steps=20", "train.eval_every=2", "train.early_stop=2", "train.eval_batches=1"]
STILL += ["scheduler=constant", "optimizer.lr=1e-30", "checkpoint.every=1"]
"""A rate at which no weight changes, so that no evaluation finds a lower loss."""


def test_early_stopping_ends_training(tmp_path: Path) -> None:
    events = train(tmp_path, *STILL)
    assert [event.step for event in of(Evaluated, events)] == [2, 4, 6]
    [finished] = of(Finished, events)
    assert (finished.step, finished.interrupted) == (6, False)
    assert of(Saved, events)[-1].step == 6
    [note] = [event.text for event in of(Noted, events)]
    assert note.startswith("train.early_stop=2: training ends, because 2 evaluations found no ")
    again = train(tmp_path, *STILL)
    assert not of(StepLogged, again)
    assert of(Finished, again)[0].step == 6


def test_nan_evaluation_is_not_best() -> None:
    history = EvaluationHistory()
    for loss in (math.nan, 3.0, 2.0, math.nan):
        history.add(loss)
    assert (history.best, history.since) == (2.0, 1)


def test_early_stopping_continues_after_resume(tmp_path: Path) -> None:
    train(tmp_path, *STILL, "train.log_every=1", stop_at=4)
    events = train(tmp_path, *STILL)
    assert of(Started, events)[0].step < 6
    assert of(Finished, events)[0].step == 6
