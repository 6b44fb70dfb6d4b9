"""An exception in a forked call is raised in the parent, with the traceback of the process."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import pytest
from support.command import Command

from axonlaunch import config
from axonlaunch.planning.background_estimate import BackgroundEstimate
from axonlaunch.system.processes import forked_call, forked_map
from axonlaunch.system.processes.forked_process import ProcessDiedError, reason_of

pytestmark = pytest.mark.usefixtures("server")
"""Calls use the shared server. Otherwise the first one would start another, which stays."""


def failure(target: str) -> tuple[Exception, str]:
    """Return the exception of a call, and its traceback as Python prints it."""
    context = get_context("forkserver")
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
        forked_call.call(context, f"support.failing:{target}")
    assert isinstance(caught.value, Exception)
    return caught.value, "".join(traceback.format_exception(caught.value))


def test_forked_call_exception_has_traceback_and_cause() -> None:
    error, printed = failure("raises")
    assert (type(error), str(error)) == (ValueError, "what was wrong")
    assert "in _deep_inside" in printed
    assert "KeyError: 'first'" in printed
    assert printed.index("in _deep_inside") < printed.index("in failure")
    assert "CallsFailedError" not in printed


def test_an_exception_that_cannot_be_pickled_is_named_with_its_traceback() -> None:
    error, printed = failure("raises_what_cannot_be_pickled")
    assert (type(error), str(error)) == (RuntimeError, "UnpicklableError: it holds a lock")
    assert "in raises_what_cannot_be_pickled" in printed


def test_forked_call_that_exits_reports_place() -> None:
    error, printed = failure("exits")
    assert str(error) == "a module ended the process with status 3"
    assert "raise SystemExit(3)" in printed


def test_forked_call_panic_is_error_with_traceback() -> None:
    error, printed = failure("panics")
    assert (type(error), str(error)) == (RuntimeError, "PanicError: index out of bounds")
    assert "in panics" in printed


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (-11, "signal 11 (SIGSEGV); compiled code failed"),
        (-9, "signal 9 (SIGKILL); the system may have run out of memory"),
        (-7, "signal 7 (SIGBUS); a file that it read may have been cut short"),
        (-15, "signal 15 (SIGTERM); another program ended it: run the command again"),
        (-40, "signal 40 (SIGRTMIN+6); another program"),
        (3, "it exited with status 3 and without an answer; look for a plug-in"),
        (None, "its status is unknown, because the fork server was ended or stopped"),
    ],
)
def test_a_dead_process_is_reported_with_its_task_signal_and_remedy(
    status: int | None, expected: str
) -> None:
    error = pickle.loads(pickle.dumps(ProcessDiedError("estimating memory", status)))
    assert str(error).startswith("a process died while estimating memory")
    assert expected in str(error)
    assert reason_of(error) == str(error)


def test_a_forked_copy_that_ends_without_an_answer_is_a_dead_process() -> None:
    def ends() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for function in (ends, lambda: os._exit(3), lambda: os._exit(0)):
        with pytest.raises(ProcessDiedError, match="a process died while testing"):
            forked_map.map_forked([function], task="testing")


def test_nested_forked_copies_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(6)})
    count: Callable[[], Any] = forked_map.share_of_cores
    nested: Callable[[], Any] = lambda: forked_map.map_forked([count, count])  # noqa: E731
    assert forked_map.map_forked([count]) == [6]
    assert forked_map.map_forked([count] * 3) == [2, 2, 2]
    assert forked_map.map_forked([nested, nested]) == [[1, 1], [1, 1]]
    assert forked_map.map_forked([count] * 9) == [1] * 9


@pytest.mark.parametrize("command", [["train"], ["estimate", "--json"], ["verify"]])
def test_no_command_shows_a_traceback_of_a_forked_process_that_died(
    served: Command, command: list[str]
) -> None:
    code = "import os\n\ndef build():\n    os.kill(os.getpid(), 11)\n"
    (served.folder / "dying_model.py").write_text(code)
    ran = served(*command, "model=custom", "model.target=dying_model:build", status=1)
    died = "a process died while checking the configuration: signal 11 (SIGSEGV); compiled code"
    assert ran.stderr.startswith(f"error: {died}")
    assert ran.stderr.count("\n") == 1
    assert not ran.stdout


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_failed_background_estimate_logs_traceback(method: str) -> None:
    context: Any = get_context(method)  # a rank of another launcher spawns an interpreter
    prediction = BackgroundEstimate(
        context, config.load(["launch.nproc=1", "model.hidden_size=24", "estimate.background=true"])
    )
    prediction.memory._call = forked_call.ForkedCall(context, "support.failing:raises", ())
    prediction.wait()
    prediction.close()
    assert prediction.memory.reason == "ValueError: what was wrong"
    assert "in _deep_inside" in prediction.memory.traceback


@pytest.mark.parametrize("settings", [[], ["estimate.background=false"]], ids=["default", "false"])
def test_cpu_run_has_no_background_estimate_by_default(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_call, "ForkedCall", None)
    overrides = ["launch.nproc=1", "hardware=cpu", "model.hidden_size=28", *settings]
    prediction = BackgroundEstimate(get_context("forkserver"), config.load(overrides))
    prediction.begin()
    prediction.wait()
    assert (prediction.memory.result, prediction.step.result) == (None, None)
    assert prediction.memory.reason == "estimate.background=true predicts it during training"


def test_traceback_of_rank_is_shown_only_with_debug(served: Command, faulty: list[str]) -> None:
    overrides = [*faulty, "model.arguments.fault=exception", "launch.backend=gloo"]
    ran = served("--debug", "verify", *overrides, status=1)
    assert "debug: axonlaunch.verification.proofs.runner: rank 1 failed" in ran.stderr
    assert "in forward" in ran.stderr
    assert ran.stdout.endswith("failed\n")


def test_debug_shows_traceback_of_config_error(served: Command) -> None:
    overrides = ["estimate", "strategy=tensor", "strategy.tensor.degree=3"]
    shown = served("--debug", *overrides, status=2).stderr
    assert "Traceback (most recent call last)" in shown
    assert shown.endswith(served(*overrides, status=2).stderr)


def test_debug_shows_traceback_of_user_builder(served: Command) -> None:
    (served.folder / "failing_model.py").write_text("def build():\n    return {}['width']\n")
    failing = ["model=custom", "model.target=failing_model:build"]
    message = (
        "error: model=custom: building it failed with KeyError: 'width' "
        f"({served.folder}/failing_model.py:2)\n"
    )
    for command in (["train"], ["inspect"], ["plan", "--devices", "2", "hardware=h100_80gb"]):
        assert served(*command, *failing, status=2).stderr == message
    shown = served("--debug", "estimate", *failing, status=2).stderr
    assert "return {}['width']" in shown
    assert "in build_on_meta" in shown
    assert shown.endswith(message)
