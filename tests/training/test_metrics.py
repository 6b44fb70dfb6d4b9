"""Metrics of evaluations: the same in every layout, and what is decided by them."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score
from support.configured import run_config
from support.logged_runs import lines, train
from support.rank_engine import rank_engine

import axonlaunch as ax
from axonlaunch import checkpoint, config
from axonlaunch.comm import RankFailedError, World
from axonlaunch.config import ConfigError
from axonlaunch.config.options.training_hooks import EVALUATION_METRICS
from axonlaunch.diagnostics.report.page_data import page_data
from axonlaunch.diagnostics.report.record.run_record import read_run
from axonlaunch.events import Evaluated, Event, Monitor, Noted
from axonlaunch.launch.output.sweep import print_sweep_table
from axonlaunch.models.build import build_model
from axonlaunch.training import worker
from axonlaunch.training.ending.early_stop import EvaluationHistory

GPT = [
    *("model=gpt", "model.num_hidden_layers=2", "model.hidden_size=32", "data=synthetic_tokens"),
    *("data.sequence_length=16", "data.num_eval_samples=19", "train.global_batch_size=8"),
]
DIGITS = ["model=mlp", "data=digits", "train.global_batch_size=8"]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    entries = dict(EVALUATION_METRICS._entries)

    @ax.register_metric("top_of_test")
    def top(outputs: Any, batch: Any, k: int = 1) -> torch.Tensor:
        """Fraction of targets among the k highest outputs."""
        assert outputs.shape[:-1] == batch["targets"].shape == batch["inputs"].shape
        counted = batch["targets"] != -100
        hits = (outputs.topk(k).indices == batch["targets"][..., None]).any(-1) & counted
        return torch.stack([hits.sum(), counted.sum()])

    @ax.register_metric(
        "f1_of_test", sums=3, value=lambda s: s[0] / (s[0] + (s[1] + s[2]) / 2), summary="F1"
    )
    def f1(outputs: Any, batch: Any) -> torch.Tensor:
        said, true = outputs.argmax(-1) > 4, batch["targets"] > 4
        return torch.stack([(said & true).sum(), (said & ~true).sum(), (~said & true).sum()])

    @ax.register_metric("rows_of_test", value=lambda s: s[0], higher_is_better=False)
    def rows(outputs: Any, batch: Any) -> torch.Tensor:
        return torch.tensor([len(outputs), 1.0])

    @ax.register_metric("tuple_of_test")
    def returns_tuple(outputs: Any, batch: Any) -> Any:
        return 1, 2

    @ax.register_metric("failing_of_test")
    def failing(outputs: Any, batch: Any) -> Any:
        return batch["labels"]

    yield
    EVALUATION_METRICS._entries.clear()
    EVALUATION_METRICS._entries.update(entries)


def of(kind: type, events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


TOP = "metrics=[{name: top_of_test, arguments: {k: 9}},rows_of_test]"
TWO = "launch.nproc=2"


@pytest.mark.parametrize(
    "layout",
    [
        ["strategy=single"],
        ["strategy=fsdp", TWO, "train.micro_batch_size=2"],
        ["strategy=tensor", TWO],
        ["strategy=tensor", TWO, "train.loss_chunk=5"],
        ["strategy=pipeline", TWO],
        ["strategy=fsdp", "strategy.context.degree=2", TWO],
        pytest.param(
            ["strategy=tensor", TWO, "strategy.tensor.sequence_parallel=true"],
            marks=pytest.mark.slow,
        ),
        pytest.param(["strategy=hybrid", "launch.nproc=8"], marks=pytest.mark.slow),
        pytest.param(
            [*("strategy=pipeline", TWO, "train.loss_chunk=5", "train.precision=bf16")],
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_metric_of_every_layout_is_that_of_plain_torch(layout: list[str]) -> None:
    chosen = run_config([*GPT, TOP, *layout])
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> torch.Tensor:
        engine, loader = rank_engine(chosen, world)
        return sum(engine.evaluate(batch) for batch in loader.eval_batches())

    _, counted, hits, all_counted, rows, _ = sum(World.mock(chosen.launch.nproc).run(run)).tolist()
    model = build_model(chosen.model, seed=chosen.seed)
    _, loader = World.mock(1).run(
        lambda world: rank_engine(run_config([*GPT, "strategy=single"]), world)
    )[0]
    expected = 0
    for batch in loader.eval_batches():
        ranked = model(batch.inputs).argsort(-1, descending=True)[..., :9]
        expected += int((ranked == batch.targets[..., None]).any(-1).sum())
    assert counted == all_counted == 19 * 16
    assert hits == pytest.approx(expected, abs=0 if "bf16" not in str(layout) else 8)
    assert rows == 19


@pytest.mark.parametrize(
    "layout",
    [
        ["strategy=ddp", "launch.nproc=4"],
        pytest.param(["strategy=zero1", TWO], marks=pytest.mark.slow),
    ],
)
def test_classifier_reports_accuracy_and_f1_of_scikit_learn(
    layout: list[str], tmp_path: Path
) -> None:
    overrides = ["train.steps=6", "train.eval_batches=99", "optimizer.lr=1e-2"]
    chosen = run_config([*DIGITS, *layout, *overrides, "metrics=[accuracy,f1_of_test]"])
    chosen = dataclasses.replace(chosen, run_dir=str(tmp_path))

    def run(world: World) -> tuple[list[int], list[int], list[float]]:
        engine, loader = rank_engine(chosen, world)
        for step in range(6):
            engine.train_step(loader.batch(step))
        said: list[int] = []
        true: list[int] = []
        sums = torch.zeros(7, dtype=torch.float64)
        for batch in loader.eval_batches():
            counted = batch.targets != -100
            said += engine.predict(batch.inputs).argmax(-1)[counted].tolist()
            true += batch.targets[counted].tolist()
            sums += engine.evaluate(batch)
        return said, true, sums.tolist()

    assert chosen.launch.nproc != "auto"
    results = World.mock(chosen.launch.nproc).run(run)
    said = [label for result in results for label in result[0]]
    true = [label for result in results for label in result[1]]
    sums = torch.tensor([result[2] for result in results]).sum(0).tolist()
    right = sum(a == b for a, b in zip(said, true, strict=True))
    assert sums[2:4] == [right, len(true)]
    tp, fp, fn = sums[4:]
    expected = f1_score([label > 4 for label in true], [label > 4 for label in said])
    assert tp / (tp + (fp + fn) / 2) == pytest.approx(expected)


def test_accuracy_of_classifiers_is_reported_by_default(tmp_path: Path) -> None:
    chosen = run_config([*DIGITS, "strategy=ddp", TWO, "train.steps=2"])
    chosen = dataclasses.replace(chosen, run_dir=str(tmp_path))
    events: list[Event] = []
    monitor = Monitor(report=events.append)
    World.mock(2).run(lambda world: worker.run(chosen, world, monitor=monitor))
    [evaluated] = of(Evaluated, events)
    assert 0 <= evaluated.metrics["accuracy"] <= 1
    [line] = [line for line in lines(tmp_path) if "eval_loss" in line]
    assert line["eval_accuracy"] == evaluated.metrics["accuracy"]
    (tmp_path / "config.yaml").write_text(config.to_yaml(chosen))
    shown = page_data([read_run(tmp_path)] * 2)
    assert shown["curves"]["eval_accuracy"] == "accuracy"
    value = round(line["eval_accuracy"], 7)
    for run in shown["runs"]:
        assert run["series"]["eval_accuracy"] == [[2], [pytest.approx(value)]]
    assert dict(shown["results"])["accuracy"] == [line["eval_accuracy"]] * 2


def test_language_model_reports_no_accuracy_by_default() -> None:
    assert run_config([*GPT, "strategy=single"]).metrics == []


WORSE = ["train.steps=8", "train.eval_every=1", "train.best_metric=worse_of_test"]
WORSE += ["metrics=[worse_of_test]"]


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Return the values that the metric ``worse_of_test`` gives in turn."""
    planned: list[float] = []

    @ax.register_metric("worse_of_test", value=lambda sums: planned.pop(0))
    def worse(outputs: Any, batch: Any) -> torch.Tensor:
        return torch.ones(2)

    yield planned
    del EVALUATION_METRICS._entries["worse_of_test"]


def test_early_stop_and_best_checkpoints_follow_a_metric(
    values: list[float], tmp_path: Path
) -> None:
    values += [0.0, 0.5, 0.2, 0.9, 0.7, 0.6, 0.1]  # the first one is the trial before the start
    overrides = ["checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.keep_best=2"]
    events = train(tmp_path, *WORSE, *overrides, "train.early_stop=2")
    [note] = [event.text for event in of(Noted, events)]
    assert note == (
        "train.early_stop=2: training ends, because 2 evaluations found no higher worse_of_test "
        "than 0.9000"
    )
    kept = {c.step: c.metrics["worse_of_test"] for c in checkpoint.list_checkpoints(tmp_path)}
    assert kept == {3: 0.9, 4: 0.7, 5: 0.6}


def test_history_of_metric_continues_after_resume_but_not_for_another_one(
    values: list[float], tmp_path: Path
) -> None:
    values += [0.0, 0.9, 0.1]
    saved = ["checkpoint.every=1", "train.early_stop=2"]
    train(tmp_path, *WORSE, *saved, "train.steps=2")
    values += [0.0, 0.5]
    events = train(tmp_path, *WORSE, *saved, "train.steps=4")
    assert [event.step for event in of(Evaluated, events)] == [3]
    values += [0.0, 0.1]
    events = train(tmp_path, *WORSE, *saved, "train.steps=4", "train.best_metric=loss")
    assert [event.step for event in of(Evaluated, events)] == [4]


def test_nan_metric_is_never_the_best() -> None:
    history = EvaluationHistory(higher_is_better=True)
    for value in (float("nan"), 0.1, float("nan"), 0.3, 0.2):
        history.add(value)
    assert (history.best, history.since) == (0.3, 1)


def test_sweep_table_has_metrics_and_marks_best_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("FORCE_COLOR", "1")
    runs = [
        {"status": "done", "run_dir": "r", "loss": 1.0, "eval_loss": loss, "metrics": {"f1": f1}}
        for loss, f1 in [(0.5, 0.2), (0.7, 0.8), (0.6, None)]
    ]
    stream = io.StringIO()
    print_sweep_table(["a", "b", "c"], runs, stream=stream, metric="f1", is_highest=True)
    heading, *rows = [line for line in stream.getvalue().splitlines() if line.strip()]
    assert "f1" in heading
    bold = [row for row in rows if "\x1b[1m" in row and "0." in row]
    assert len(bold) == 1
    assert "0.8000" in bold[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["metrics=[tuple_of_test]"],
            "metrics[0]=tuple_of_test: it returned (1, 2); return a tensor of 2 sums, as in "
            "torch.stack([total, count])",
        ),
        (
            ["metrics=[accuracy,failing_of_test]"],
            "metrics[1]=failing_of_test: computing it failed with KeyError: 'labels'",
        ),
        (
            ["metrics=[accuracy,accuracy]"],
            "metrics[1]=accuracy: accuracy is listed twice; remove it",
        ),
        (
            ["metrics=[accuracy]", "train.best_metric=f1"],
            "train.best_metric=f1: no metric of the run has this name; use loss or accuracy, or "
            "add it to metrics",
        ),
        (
            ["metrics=[{target: nowhere:f}]"],
            "metrics[0].target=nowhere:f: ",
        ),
    ],
)
def test_wrong_metrics_are_refused_before_start(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run_config([*GPT, "strategy=single", *overrides])
    assert len(raised.value.problems) == 1
    assert str(raised.value).startswith(message)


def test_metric_that_returns_no_tensor_in_a_rank_is_one_error() -> None:
    chosen = run_config([*GPT, "strategy=single", "metrics=[rows_of_test]"])
    chosen = dataclasses.replace(
        chosen, metrics=[dataclasses.replace(chosen.metrics[0], name="tuple_of_test")]
    )

    def run(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        engine.evaluate(next(loader.eval_batches()))

    with pytest.raises(RankFailedError, match=r"metrics\[0\]=tuple_of_test: it returned \(1, 2\);"):
        World.mock(1).run(run)


def test_metric_that_fails_with_a_custom_loss_ends_the_run_before_the_first_step(
    tmp_path: Path,
) -> None:
    ax.register_loss("squares_for_metrics")(lambda outputs, batch: outputs.square().sum())
    chosen = ["train.loss=squares_for_metrics", "metrics=[tuple_of_test]"]
    with pytest.raises(RankFailedError, match=r"metrics\[0\]=tuple_of_test: it returned \(1, 2\);"):
        train(tmp_path / "run", "train.steps=1", *chosen)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or lines(tmp_path / "run") == []


def test_custom_metric_is_named_by_its_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "metrics_of_test.py").write_text(
        "import torch\n"
        "def longest(outputs, batch, scale=1):\n"
        "    return torch.tensor([scale * float(len(outputs)), float(len(outputs))])\n"
    )
    given = "metrics=[{target: metrics_of_test:longest, arguments: {scale: 3}}]"
    [evaluated] = of(Evaluated, train(tmp_path / "run", "train.steps=1", given))
    assert evaluated.metrics == {"longest": 3.0}
