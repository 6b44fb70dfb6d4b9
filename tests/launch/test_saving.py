"""Saving while ranks are killed: checkpoints are complete, and the run resumes to the bit."""

from __future__ import annotations

import pytest
from support.command import Command

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


@pytest.mark.slow
@pytest.mark.parametrize("background", ["true", "false"])
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


def test_partial_save_is_reported_and_deleted(served: Command, faulty: list[str]) -> None:
    run = [*run_of(faulty), "name=run"]
    served("train", *run)
    left = served.folder / "runs/run/checkpoints/step_14.partial"
    left.mkdir()
    ran = served("train", *run, "train.steps=13")
    reported = " ".join(ran.stdout.split())
    assert "checkpoints/step_14.partial: deleted (left by an interrupted save)" in reported
    assert not left.exists()
