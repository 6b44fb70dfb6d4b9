"""Damaged or replaced files of a run folder are reported in one line, without waiting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.command import Command

OVERRIDES = ["strategy=ddp", "launch.nproc=2", "name=run", "checkpoint.every=2"]


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link(file: Path) -> None:
    file.symlink_to(file.rename(file.with_name("aside")))


def cut(file: Path) -> None:
    file.write_text("seed: [")


CHANGES = {"a FIFO": (fifo, "is not a regular file"), "cut": (cut, "not YAML: ")}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", CHANGES)
def test_run_with_damaged_configuration_resumes_with_note(name: str, served: Command) -> None:
    change, reason = CHANGES[name]
    served.train(*OVERRIDES, "train.steps=2")
    file = served.folder / "runs/run/config.yaml"
    intact = file.read_text()
    change(file)
    said = " ".join(served.train(*OVERRIDES, "train.steps=4").stdout.split())
    assert f"config.yaml: can't be read ({reason}" in said
    assert "so changed settings can't be reported" in said
    assert len(served.losses("run")) == 4
    assert file.read_text() == intact.replace("  steps: 2", "  steps: 4")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("change", [fifo, link])
def test_metrics_are_not_written_to_special_files(change: object, served: Command) -> None:
    assert callable(change)
    served.train(*OVERRIDES, "train.steps=2")
    change(served.folder / "runs/run/metrics.jsonl")
    errors = served.train(*OVERRIDES, "train.steps=4", status=2).stderr
    assert errors.startswith("error: run_dir: ")
    assert "run/metrics.jsonl is not a regular file; remove it, or use another run folder" in errors


def dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to("/nowhere")


@pytest.mark.parametrize("change", [link, fifo, dangling])
def test_a_rank_log_that_is_a_link_or_a_fifo_is_an_error_line(
    change: object, served: Command
) -> None:
    assert callable(change)
    log = served.folder / "runs/run/logs/rank_1.log"
    log.parent.mkdir(parents=True)
    log.touch()
    change(log)
    errors = served.train(*OVERRIDES, "train.steps=2", status=2).stderr
    assert errors.splitlines() == [
        f"error: run_dir: {log} is not a regular file; remove it, or use another run folder"
    ]


def test_a_tokenizer_folder_that_is_a_link_is_not_written_through(served: Command) -> None:
    folder, victim = served.folder / "runs/run", served.folder / "victim"
    (folder / "logs").mkdir(parents=True)
    victim.mkdir()
    (folder / "tokenizer").symlink_to(victim)
    errors = served.train(*OVERRIDES, "train.steps=2", status=2).stderr
    assert (
        errors
        == f"error: run_dir: {folder}/tokenizer is a link; remove it, or use another run folder\n"
    )
