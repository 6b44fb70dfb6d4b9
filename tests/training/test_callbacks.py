"""Callbacks of users: when they are called, with what, and how they end training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.configured import run_config
from support.logged_runs import lines, notes, train

import axonlaunch as ax
from axonlaunch import checkpoint
from axonlaunch.comm import RankFailedError
from axonlaunch.config import ConfigError
from axonlaunch.config.options.training_hooks import CALLBACKS
from axonlaunch.events import Evaluated, Finished, Saved, StepLogged

Calls = list[tuple[str, int, int]]
"""Rank, moment and step of each call."""


@pytest.fixture
def called() -> Iterator[list[tuple[str, ax.RunState]]]:
    """Register ``recorder_of_test``; return the moments and states of its calls on all ranks."""
    entries = dict(CALLBACKS._entries)
    calls: list[tuple[str, ax.RunState]] = []

    @ax.register_callback("recorder_of_test")
    class Recorder(ax.Callback):
        """Records calls, and asks to stop."""

        def __init__(self, stop_at: int | None = None, rank: int = 0, moment: str = "step") -> None:
            self.stop_at, self.rank, self.moment = stop_at, rank, moment

        def _record(self, moment: str, run: ax.RunState) -> None:
            calls.append((moment, run))
            if (run.step, run.rank, moment) == (self.stop_at, self.rank, self.moment):
                run.request_stop("enough")

        def start(self, run: ax.RunState) -> None:
            self._record("start", run)

        def step(self, run: ax.RunState) -> None:
            self._record("step", run)

        def evaluation(self, run: ax.RunState) -> None:
            self._record("evaluation", run)

        def save(self, run: ax.RunState) -> None:
            self._record("save", run)

        def end(self, run: ax.RunState) -> None:
            self._record("end", run)

    @ax.register_callback("failing_of_test")
    class Failing(ax.Callback):
        """Fails."""

        def evaluation(self, run: ax.RunState) -> None:
            run.config["train"]["nowhere"]

    ax.register_callback("underived_of_test")(lambda: {"no": "callback"})
    yield calls
    CALLBACKS._entries.clear()
    CALLBACKS._entries.update(entries)


STEPS = ["train.steps=5", "train.eval_every=2", "checkpoint.every=3"]
RECORDER = "callbacks=[recorder_of_test]"


@pytest.mark.parametrize(
    "layout",
    [
        ["strategy=ddp"],
        ["strategy=pipeline"],
        pytest.param(["strategy=tensor"], marks=pytest.mark.slow),
    ],
)
def test_callbacks_are_called_at_each_moment_on_every_rank(
    layout: list[str], called: list[tuple[str, ax.RunState]], tmp_path: Path
) -> None:
    overrides = [*STEPS, RECORDER, *layout, "data.num_samples=16", "model.num_hidden_layers=2"]
    events = train(tmp_path, *overrides, ranks=2)
    expected = [("start", 0)]
    for step in range(1, 6):
        expected.append(("step", step))
        expected += [("evaluation", step)] * (step in (2, 4, 5))
        expected += [("save", step)] * (step in (3, 5))
    expected.append(("end", 5))
    for rank in (0, 1):
        states = [(moment, run) for moment, run in called if run.rank == rank]
        assert [(moment, run.step) for moment, run in states] == expected
    logged = {e.step: e.loss for e in events if isinstance(e, StepLogged)}
    evaluated = {e.step: e.eval_loss for e in events if isinstance(e, Evaluated)}
    saved = {e.step: Path(e.path) for e in events if isinstance(e, Saved)}
    for moment, run in called:
        assert (run.steps, run.world_size, run.run_dir) == (5, 2, tmp_path)
        assert run.is_main == (run.rank == 0)
        assert run.epoch == run.step / 2
        assert run.loss == (logged[run.step] if run.step else None)
        if moment == "evaluation":
            assert run.eval_loss == evaluated[run.step]
        if moment == "save":
            assert run.checkpoint == saved[run.step]
        assert run.config["train"]["global_batch_size"] == 8


@pytest.mark.parametrize(
    ("rank", "moment"),
    [
        (0, "step"),
        (1, "save"),
        *(
            pytest.param(rank, moment, marks=pytest.mark.slow)
            for rank, moment in ((1, "step"), (0, "save"), (0, "evaluation"), (1, "evaluation"))
        ),
    ],
)
def test_stop_request_of_one_rank_ends_all_ranks_together(
    rank: int, moment: str, called: list[tuple[str, ax.RunState]], tmp_path: Path
) -> None:
    arguments = f"{{stop_at: 2, rank: {rank}, moment: {moment}}}"
    chosen = f"callbacks=[{{name: recorder_of_test, arguments: {arguments}}}]"
    overrides = ["train.steps=9", "train.eval_every=2", "checkpoint.every=2", chosen]
    events = train(tmp_path, *overrides, ranks=2)
    # On a CPU the ranks learn of the request in the next step.
    assert {run.step for kind, run in called if kind == "end"} == {3}
    assert sum(kind == "end" for kind, _ in called) == 2
    [note] = [note for note in notes(events) if "enough" in note]
    assert note == "callbacks[0]=recorder_of_test: enough; training ends after step 3"
    [done] = [event for event in events if isinstance(event, Finished)]
    assert (done.step, done.interrupted) == (3, False)
    assert [event.step for event in events if isinstance(event, Evaluated)] == [2, 3]
    assert [c.step for c in checkpoint.list_checkpoints(tmp_path)] == [2, 3]


def test_state_of_callbacks_can_only_be_read(
    called: list[tuple[str, ax.RunState]], tmp_path: Path
) -> None:
    train(tmp_path, "train.steps=1", RECORDER)
    state: Any = called[-1][1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.step = 7
    for mapping in (state.metrics, state.config):
        with pytest.raises(TypeError):
            mapping["loss"] = 1.0


def test_resumed_run_calls_from_its_step(
    called: list[tuple[str, ax.RunState]], tmp_path: Path
) -> None:
    train(tmp_path, "train.steps=2", "checkpoint.every=2")
    train(tmp_path, "train.steps=4", "checkpoint.every=2", RECORDER)
    moments = [(kind, run.step) for kind, run in called if kind in ("start", "step")]
    assert moments == [("start", 2), ("step", 3), ("step", 4)]


def test_losses_with_callbacks_are_those_without(
    called: list[tuple[str, ax.RunState]], tmp_path: Path
) -> None:
    train(tmp_path / "with", *STEPS, RECORDER)
    train(tmp_path / "without", *STEPS)
    losses = [
        [line["loss"] for line in lines(tmp_path / name) if "loss" in line]
        for name in ("with", "without")
    ]
    assert losses[0] == losses[1]


def test_failing_callback_ends_run_with_its_name(called: Any, tmp_path: Path) -> None:
    with pytest.raises(
        RankFailedError,
        match=r"CallbackError: callbacks\[0\]=failing_of_test: evaluation\(run\) failed with "
        r"KeyError: 'nowhere'",
    ):
        train(tmp_path, "train.steps=2", "callbacks=[failing_of_test]")


def test_callback_without_base_class_is_refused(called: Any, tmp_path: Path) -> None:
    with pytest.raises(
        RankFailedError, match=r"is a dict; derive its class from axonlaunch\.Callb"
    ):
        train(tmp_path, "train.steps=2", "callbacks=[underived_of_test]")


def test_custom_callback_is_imported_before_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"callbacks\[0\]\.target=nowhere:Mine: "):
        run_config(["callbacks=[{target: nowhere:Mine}]", "strategy=single"])
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "callbacks_of_test.py").write_text(
        "import axonlaunch as ax\n"
        "class Noting(ax.Callback):\n"
        "    def __init__(self, text):\n"
        "        self.text = text\n"
        "    def end(self, run):\n"
        "        (run.run_dir / 'noted').write_text(self.text)\n"
        "class Underived:\n"
        "    def step(self, run): ...\n"
        "class Uncalled(ax.Callback):\n"
        "    def on_step_end(self, run): ...\n"
    )
    for name, reason in {
        "Underived": "is no callback; derive",
        "Uncalled": "must define one of the methods start, step",
    }.items():
        with pytest.raises(
            ConfigError, match=rf"callbacks\[0\]\.target=callbacks_of_test:{name}: {reason}"
        ):
            run_config([f"callbacks=[{{target: callbacks_of_test:{name}}}]", "strategy=single"])
    given = "callbacks=[{target: callbacks_of_test:Noting, arguments: {text: done}}]"
    train(tmp_path / "run", "train.steps=1", given)
    assert (tmp_path / "run/noted").read_text() == "done"


def test_registered_class_must_be_callback_with_a_method() -> None:
    class Uncalled(ax.Callback):
        def on_step_end(self) -> None: ...

    for builder, reason in ((Uncalled, "must define one of"), (dict, "is no callback; derive")):
        with pytest.raises(
            TypeError, match=rf"register_callback\('x'\): {builder.__name__} {reason}"
        ):
            ax.register_callback("x")(builder)
