"""Saving while ranks are killed: checkpoints are complete, and the run resumes to the bit."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from command import Command, wait_for
from covers import every

from axonlaunch import checkpoint
from axonlaunch.checkpoint.format import step_folders


def run_of(faulty: list[str]) -> list[str]:
    return [
        *faulty,
        "checkpoint.every=1",
        "checkpoint.keep_last=2",
        "train.steps=12",
        "strategy=fsdp",
    ]


@pytest.mark.deferred
@pytest.mark.parametrize("background", every(2, ["true", "false"]))
def test_saving_does_not_change_training(
    served: Command, faulty: list[str], background: str
) -> None:
    run = [*run_of(faulty), f"checkpoint.async_save={background}"]
    ran = served("train", *run, "name=saving")
    served("train", *run[:-4], "strategy=fsdp", "train.steps=12", "name=without")
    assert served.losses("saving") == served.losses("without")
    assert ran.stdout.count("saved runs/saving/checkpoints/step_") == 12
    checkpoints = checkpoint.list_checkpoints(served.folder / "runs" / "saving")
    assert [c.step for c in checkpoints] == [11, 12]
    assert all(step_folders.damage(c) == [] for c in checkpoints)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("background", "kills"),
    [
        pytest.param("false", 25, marks=pytest.mark.slow),
        pytest.param("true", 25, marks=pytest.mark.slow),
    ],
)
def test_run_killed_during_save_resumes_from_complete_checkpoint(
    served: Command, faulty: list[str], background: str, kills: int
) -> None:
    run = [*run_of(faulty), f"checkpoint.async_save={background}"]
    served("train", *run, "name=whole")
    expected = served.losses("whole")
    draw = random.Random(kills)
    for number in range(kills):
        name = f"run{number}"
        folder = served.folder / "runs" / name
        process = served.start("train", *run, f"name={name}", "model.arguments={pause:0.03}")
        wait_for(lambda f=folder: checkpoint.latest(f) is not None)  # type: ignore[misc]
        time.sleep(draw.uniform(0, 0.5))
        for rank in served.processes():
            try:
                os.kill(rank, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.communicate(timeout=30)
        assert checkpoint.corrupt_checkpoints(folder) == {}
        assert all(step_folders.damage(c) == [] for c in checkpoint.list_checkpoints(folder))
        # Also completed if it was killed after its last save.
        served("train", *run, f"name={name}")
        assert served.summary(name)["status"] == "done"
        assert served.losses(name) == expected, f"kill {number}"
        assert not list((folder / "checkpoints").glob("*.partial"))


def test_partial_save_is_reported_and_deleted(served: Command, faulty: list[str]) -> None:
    run = [*run_of(faulty), "name=run"]
    served("train", *run)
    left = served.folder / "runs/run/checkpoints/step_14.partial"
    left.mkdir()
    ran = served("train", *run, "train.steps=13")
    reported = " ".join(ran.stdout.split())
    assert "checkpoints/step_14.partial: deleted (left by an interrupted save)" in reported
    assert not left.exists()
