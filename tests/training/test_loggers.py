"""Logged values of a run: where they are written, continued after a resume; errors end no run."""

from __future__ import annotations

import dataclasses
import inspect
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.configured import run_config
from support.logged_runs import TINY, lines, notes, train

from axonlaunch import config
from axonlaunch.config import ConfigError
from axonlaunch.events import Evaluated, StepLogged
from axonlaunch.training.loggers.logger import Logger, RunInfo
from axonlaunch.training.loggers.registry import register_logger


def train_twice(folder: Path, *overrides: str) -> None:
    """Train to step 7 with a checkpoint after step 4, then from there to step 8."""
    with pytest.raises(Exception, match="KilledError"):
        train(folder, *overrides, "train.steps=8", "checkpoint.every=4", killed_at=7)
    train(folder, *overrides, "train.steps=8", "checkpoint.every=4")


def is_sorted(steps: list[int]) -> bool:
    return steps == sorted(steps)


# A logger's calls


class Recording(Logger):
    """Records its calls."""

    calls: list[tuple[Any, ...]] = []

    def start(self, run: RunInfo) -> None:
        self.calls.append(("start", run.resumed_at))

    def log(self, metrics: Mapping[str, int | float], *, step: int) -> None:
        self.calls.append(("log", step, dict(metrics)))

    def close(self, *, failed: bool) -> None:
        self.calls.append(("close", failed))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return the calls of the logger that is registered as ``recording``."""
    monkeypatch.setattr(Recording, "calls", [])
    register_logger("recording")(Recording)
    return Recording.calls


def steps_of(calls: list[tuple[Any, ...]]) -> list[int]:
    return [call[1] for call in calls if call[0] == "log"]


def test_only_main_rank_logs_each_value_once(tmp_path: Path, calls: list[Any]) -> None:
    train(tmp_path, "loggers=[recording]", "train.steps=3", "train.eval_every=0", ranks=4)
    assert calls[0] == ("start", None)
    assert calls[-1] == ("close", False)
    assert steps_of(calls) == [1, 2, 3, 3]
    logged = {step: metrics for _, step, metrics in calls[1:-2]}
    written = [line for line in lines(tmp_path) if "loss" in line]
    assert [{"step": step, **metrics} for step, metrics in logged.items()] == written
    assert calls[-2][2].keys() == {"eval_loss", "eval_tokens", "perplexity"}


def test_logger_calls_match_method_names() -> None:
    numbers = {
        field.name
        for event in (StepLogged, Evaluated)
        for field in dataclasses.fields(event)
        if re.match("int|float", str(field.type))
    }
    named = set(re.findall(r"\w+", inspect.getdoc(Logger.log) or ""))
    assert numbers <= named


def test_a_run_that_fails_closes_its_loggers_as_failed(tmp_path: Path, calls: list[Any]) -> None:
    with pytest.raises(Exception, match="KilledError"):
        train(tmp_path, "loggers=[recording]", "train.steps=3", killed_at=2)
    assert calls[-1] == ("close", True)


def test_the_steps_of_a_resumed_run_never_decrease(tmp_path: Path, calls: list[Any]) -> None:
    train_twice(tmp_path, "loggers=[recording]")
    starts = [call[1] for call in calls if call[0] == "start"]
    assert starts == [None, 4]
    steps = steps_of(calls)
    assert is_sorted(steps)
    assert set(steps) == set(range(1, 9))


def test_logged_steps_never_decrease_after_second_kill(tmp_path: Path, calls: list[Any]) -> None:
    overrides = ["loggers=[recording]", "train.steps=8", "checkpoint.every=4"]
    for killed_at in (7, 5):
        with pytest.raises(Exception, match="KilledError"):
            train(tmp_path, *overrides, killed_at=killed_at)
    train(tmp_path, *overrides)
    assert is_sorted(steps_of(calls))


def test_run_without_resume_logs_from_first_step(tmp_path: Path, calls: list[Any]) -> None:
    train(tmp_path, "loggers=[recording]", "train.steps=4", "checkpoint.every=0")
    calls.clear()
    train(tmp_path, "loggers=[recording]", "train.steps=4", "checkpoint.every=0")
    assert set(steps_of(calls)) == {1, 2, 3, 4}


# Loggers that fail

FAULTY = """
class Faulty:
    def __init__(self, where):
        self.where = where
        self.fail("made")

    def fail(self, where):
        if where == self.where:
            raise RuntimeError(f"no service: {where}")

    def start(self, run):
        self.fail("start")

    def log(self, metrics, *, step):
        self.fail("log")

    def close(self, *, failed):
        self.fail("close")
"""


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a working folder with a module of a logger that fails at a configured call."""
    (tmp_path / "faulty_logger.py").write_text(FAULTY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("faulty_logger", None)


@pytest.mark.parametrize(
    ("method", "when"),
    [
        ("made", "when it was started"),
        ("start", "when it was started"),
        ("log", "at step 1"),
        ("close", "when it was closed"),
    ],
)
def test_failing_logger_is_reported_once_without_ending_run(
    method: str, when: str, faulty: Path, calls: list[Any]
) -> None:
    logger = f"{{target: faulty_logger:Faulty, arguments: {{where: {method}}}}}"
    events = train(faulty / "run", f"loggers=[{logger},recording]", "train.steps=3")
    [note] = notes(events)
    assert note.startswith(
        f"loggers: faulty_logger:Faulty failed {when}, and training continues: "
        f"RuntimeError: no service: {method} ({faulty}/faulty_logger.py:"
    )
    assert [step for _, step, metrics in calls[1:-1] if "loss" in metrics] == [1, 2, 3]


@pytest.mark.parametrize(
    ("logger", "message"),
    [
        (
            "{target: no_such_logger:A}",
            "loggers[0].target=no_such_logger:A: No module named 'no_such_logger'; write "
            "package.module:name, importable from where you start",
        ),
        (
            "{target: faulty_logger:Faulty, arguments: {were: log}}",
            "loggers[0].arguments.were=log: there is no argument 'were'; did you mean where? "
            "known: where",
        ),
        (
            "{target: faulty_logger:Faulty}",
            "loggers[0].target=faulty_logger:Faulty: missing a required argument: 'where'; "
            "arguments that it takes: where",
        ),
        (
            "custom",
            "loggers[0]=custom: names no logger; {target: package.module:Class} is a custom",
        ),
        ("faulty_logger:Faulty", "loggers[0]=faulty_logger:Faulty: names no logger; {target: "),
        ("{traget: math:pi}", "loggers[0]={traget:math:pi}: has no name; did you mean target? "),
        (
            "3",
            "loggers[0]=3: is not a name; write loggers=[NAME], custom",
        ),
        ("{target: math:pi}", "loggers[0].target=math:pi: is float, not a class or function"),
        (
            "mlfow",
            "loggers[0].name=mlfow: there is no logger 'mlfow'; did you mean mlflow? known: ",
        ),
        (
            "{name: wandb, projct: mine}",
            "loggers[0].projct=mine: there is no such key; did you mean loggers[0].project?",
        ),
        ("mlflow,mlflow", "loggers: mlflow is listed 2 times; list it once"),
    ],
)
def test_logger_errors_are_reported_before_start(logger: str, message: str, faulty: Path) -> None:
    with pytest.raises(ConfigError) as error:
        run_config([*TINY, f"loggers=[{logger}]"])
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("logger", "message"),
    [
        ("wandb", "wandb is not installed; pip install 'axonlaunch[wandb]'"),
        ("mlflow", "MLflow is not installed; pip install 'axonlaunch[mlflow]'"),
        ("tensorboard", "TensorBoard is not installed; pip install 'axonlaunch[tensorboard]'"),
    ],
)
def test_missing_logger_package_names_install_command(
    logger: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        config.load([f"loggers=[{logger}]"])
    assert str(error.value) == f"loggers={logger}: {message}"


def test_folder_named_wandb_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights & Biases creates a folder ``wandb`` in the working folder."""
    from axonlaunch.config.registry import Needs

    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert Needs("only_a_folder", "It", "it").is_missing


# Included loggers


def test_tensorboard_holds_the_losses(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, "loggers=[tensorboard]", "train.steps=3")
    losses = [line["loss"] for line in lines(tmp_path) if "loss" in line]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses)


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of a run that was written offline: protobuf in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, offset, record = file.read_bytes(), 7, b""
    while offset + 7 <= len(content):
        left = 32768 - offset % 32768
        if left < 7:  # no header fits into the rest of the block
            offset += left
            continue
        length, kind = struct.unpack("<HB", content[offset + 4 : offset + 7])
        record += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield Record.FromString(record)
            record = b""


@pytest.mark.slow
def test_a_resumed_run_continues_its_run_of_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    folder = tmp_path / "run"
    train_twice(folder, "loggers=[{name: wandb, mode: offline, project: mine}]")
    records = [
        record
        for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))
        for record in wandb_records(file)
    ]
    runs = [record.run for record in records if record.HasField("run")]
    assert len({run.run_id for run in runs}) == 1
    assert {(run.project, run.display_name) for run in runs} == {("mine", "run")}
    assert len([*folder.glob("wandb/offline-run-*")]) == 2
    steps = [record.history.step.num for record in records if record.HasField("history")]
    assert is_sorted(steps)
    assert set(steps) == set(range(1, 9))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("store", ["file:{}/store", "sqlite:///{}/store.db"])
def test_a_resumed_run_continues_its_run_of_mlflow(tmp_path: Path, store: str) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    uri = store.format(tmp_path)
    folder = tmp_path / "run"
    train_twice(folder, f"loggers=[{{name: mlflow, tracking_uri: '{uri}', experiment: mine}}]")
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["train.steps"] == "8"
    history = sorted(client.get_metric_history(run.info.run_id, "loss"), key=lambda m: m.timestamp)
    assert is_sorted([metric.step for metric in history])
    losses = {line["step"]: line["loss"] for line in lines(folder) if "loss" in line}
    assert {metric.step: metric.value for metric in history} == losses
