"""Loggers run in threads: a slow, hanging or dead one delays no step and ends no run."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.logged_runs import lines, notes, train

from axonlaunch.events import Event, StepLogged
from axonlaunch.training import loggers
from axonlaunch.training.loggers import background, event_log
from axonlaunch.training.loggers.logger import Logger, RunInfo
from axonlaunch.training.loggers.registry import register_logger

FEW_STEPS = ["train.steps=8", "train.eval_every=0", "train.eval_batches=0"]
Number = int | float


class Custom(Logger):
    """Calls a function of the test for each logged step."""

    on_start: Callable[[], None] = staticmethod(lambda: None)
    on_log: Callable[[int], None] = staticmethod(lambda step: None)
    closed: list[bool] = []

    def start(self, run: RunInfo) -> None:
        type(self).on_start()

    def log(self, metrics: Mapping[str, Number], *, step: int) -> None:
        type(self).on_log(step)

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)


@pytest.fixture
def custom(monkeypatch: pytest.MonkeyPatch) -> type[Custom]:
    """Register a logger as ``background_test``, which is called without pauses."""
    monkeypatch.setattr(Custom, "on_start", staticmethod(lambda: None))
    monkeypatch.setattr(Custom, "on_log", staticmethod(lambda step: None))
    monkeypatch.setattr(Custom, "closed", [])
    monkeypatch.setattr(background, "_PAUSES_S", (0.0, 0.0))
    register_logger("background_test")(Custom)
    return Custom


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Block a logger until the test ends; a run waits half a second for its loggers."""
    monkeypatch.setattr(loggers, "_DRAIN_S", 0.5)
    event = threading.Event()
    yield event
    event.set()


def run(folder: Path, *overrides: str, logger: str = "background_test") -> list[Event]:
    return train(folder / "run", f"loggers=[{logger}]", *FEW_STEPS, *overrides)


def before_close(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> None:
    """Call a function after training, before loggers are closed."""
    closing = background.BackgroundLogger.begin_close

    def begin_close(self: background.BackgroundLogger, *, failed: bool) -> None:
        call()
        closing(self, failed=failed)

    monkeypatch.setattr(background.BackgroundLogger, "begin_close", begin_close)


def test_a_logger_that_hangs_at_its_start_delays_no_step_and_is_reported_once(
    tmp_path: Path, custom: type[Custom], blocked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom, "on_start", staticmethod(blocked.wait))
    events = run(tmp_path)
    [note] = notes(events)
    assert note == (
        "loggers: background_test did not finish a call (when it was started) in the time that "
        "the end of a run waits for it; the 8 logged steps or evaluations in its queue are lost"
    )
    assert [line["step"] for line in lines(tmp_path / "run")] == [*range(1, 9)]


def test_a_logger_call_that_does_not_return_is_reported_while_training_continues(
    tmp_path: Path, custom: type[Custom], blocked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_LATE_S", 0.0)
    monkeypatch.setattr(custom, "on_log", staticmethod(lambda step: blocked.wait()))
    events = run(tmp_path)
    [note] = notes(events)
    assert note.startswith("loggers: background_test has not answered for 0 s (")
    assert len([event for event in events if isinstance(event, StepLogged)]) == 8


def test_a_logger_is_switched_off_after_three_failures_in_a_row(
    tmp_path: Path, custom: type[Custom], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def fail(step: int) -> None:
        tried.append(step)
        raise OSError(f"no service at step {step}")

    monkeypatch.setattr(custom, "on_log", staticmethod(fail))
    [note] = notes(run(tmp_path))
    assert tried == [1, 2, 3]
    assert note.startswith(
        "loggers: background_test failed at step 1, and training continues: OSError: no service at "
        "step 1"
    )
    assert note.endswith("; after 3 failures in a row it is switched off")
    # and therefore also on the run's page
    assert note in (tmp_path / "run/events.jsonl").read_text()
    assert not custom.closed


def test_a_builder_that_returns_no_logger_is_reported_and_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    built_three = threading.Event()

    def build() -> None:
        built.append(len(built) + 1)
        if len(built) == 3:
            built_three.set()

    monkeypatch.setattr(background, "_PAUSES_S", (0.0, 0.0))
    register_logger("background_test")(build)
    before_close(monkeypatch, lambda: built_three.wait(60))
    [note] = notes(run(tmp_path))
    assert "TypeError: it was built as NoneType, which has no log(metrics, *, step)" in note
    assert built == [1, 2, 3]


def test_occasionally_failing_logger_gets_all_other_steps(
    tmp_path: Path, custom: type[Custom], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[int] = []

    def fail_at_even_steps(step: int) -> None:
        if step % 2 == 0:
            raise OSError("no service")
        logged.append(step)

    monkeypatch.setattr(custom, "on_log", staticmethod(fail_at_even_steps))
    assert len(notes(run(tmp_path))) == 1
    assert logged == [1, 3, 5, 7]
    assert custom.closed == [False]


def test_logger_with_failed_start_is_restarted_without_loss(
    tmp_path: Path, custom: type[Custom], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[int] = []
    failures = iter([True, True, False])
    started = threading.Event()

    def fail_twice() -> None:
        if next(failures):
            raise OSError("not yet")
        started.set()

    monkeypatch.setattr(custom, "on_start", staticmethod(fail_twice))
    monkeypatch.setattr(custom, "on_log", staticmethod(logged.append))
    before_close(monkeypatch, lambda: started.wait(60))
    run(tmp_path)
    assert logged == [*range(1, 9)]


def test_values_dropped_by_slow_logger_are_counted(
    tmp_path: Path, custom: type[Custom], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_MAX_WAITING", 2)
    go_on = threading.Event()
    monkeypatch.setattr(custom, "on_log", staticmethod(lambda step: go_on.wait()))
    before_close(monkeypatch, go_on.set)
    [note] = notes(run(tmp_path))
    dropped = int(note.split()[6])
    assert note.startswith("loggers: background_test was slower than training: ")
    assert dropped in (5, 6)  # 8 minus two that wait and perhaps one that is being logged


def test_a_run_that_fails_does_not_wait_for_a_logger_that_hangs(
    tmp_path: Path, custom: type[Custom], blocked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom, "on_log", staticmethod(lambda step: blocked.wait()))
    began = time.monotonic()
    with pytest.raises(Exception, match="KilledError"):
        train(tmp_path / "run", "loggers=[background_test]", *FEW_STEPS, killed_at=3)
    assert time.monotonic() - began < 20


@pytest.fixture(params=["refuses", "never answers"])
def dead_server(request: Any) -> Iterator[int]:
    """Return the port of an MLflow server that refuses connections, or accepts and never
    answers.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if request.param == "never answers":
            server.listen()
        yield server.getsockname()[1]


def test_a_dead_mlflow_server_delays_no_step_and_ends_no_run(
    tmp_path: Path, dead_server: int, blocked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    # MLflow pauses 2, 4, 8 and 16 s between its retries, after which its thread ends.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "4")
    uri = f"http://127.0.0.1:{dead_server}"
    events = run(tmp_path, logger=f"{{name: mlflow, tracking_uri: '{uri}'}}")
    steps = [event.step for event in events if isinstance(event, StepLogged)]
    assert steps == [*range(1, 9)]
    [note] = notes(events)
    assert note.startswith("loggers: mlflow did not finish a call (when it was started)")


def test_events_that_can_not_be_written_are_reported_once_and_end_no_run(
    tmp_path: Path, custom: type[Custom], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(event_log, "append_event", refuse)
    [note] = notes(run(tmp_path, "checkpoint.every=2"))
    assert note.startswith("loggers: events.jsonl can't be written, and training continues: OSErr")
