"""A fine-tuning run says, freezes and keeps the settings that it chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command import Command
from support.configured import run_config
from support.hf_families import save

from axonlaunch.comm import World
from axonlaunch.config import to_yaml
from axonlaunch.events import Monitor, Started, StepLogged
from axonlaunch.training import worker

CHOSEN = {"lr": 2e-5, "weight_decay": 0.0, "betas": [0.9, 0.999]}


def frozen(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
    return content


def pretrained(folder: Path) -> list[str]:
    save("llama", folder / "model")
    model = ["model=hf", "model.path=model", "data=synthetic_tokens", "data.sequence_length=16"]
    return [*model, "train.global_batch_size=4", "train.eval_batches=0", "launch.nproc=1"]


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_start_of_fine_tuning_names_its_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = run_config([*pretrained(tmp_path), "train.steps=4", f"run_dir={tmp_path}"])
    events: list[Any] = []
    monitor = Monitor(report=events.append)
    World.mock(1).run(lambda world: worker.run(config, world, monitor=monitor))
    [started] = [event for event in events if isinstance(event, Started)]
    [note] = [note for note in started.notes if "full fine-tuning" in note]
    assert note.startswith("optimizer.lr=2e-05, the default for full fine-tuning; also ")
    assert note.endswith("train.precision=fp32 (on a CPU)")
    logged = [event for event in events if isinstance(event, StepLogged)]
    assert [event.step for event in logged] == [1, 2, 3, 4]
    assert logged[0].lr == CHOSEN["lr"]


@pytest.mark.slow
def test_fine_tuning_says_and_freezes_its_defaults(served: Command) -> None:
    command = ["train", *pretrained(served.folder), "train.steps=4", "name=run"]
    printed = one_line(served(*command).stdout)
    assert "optimizer.lr=2e-05, the default for full fine-tuning; also " in printed
    assert "train.precision=fp32 (on a CPU)" in printed
    content = frozen(served.folder / "runs/run")
    assert {key: content["optimizer"][key] for key in CHOSEN} == CHOSEN
    assert content["scheduler"]["warmup_ratio"] == 0.03
    assert content["train"]["precision"] == "fp32"
    assert "run is finished" in served(*command).stdout


@pytest.mark.slow
def test_resumed_fine_tuning_keeps_its_defaults(served: Command) -> None:
    command = ["train", *pretrained(served.folder), "checkpoint.every=2", "name=run"]
    served(*command, "train.steps=2")
    printed = one_line(served(*command, "train.steps=4").stdout)
    assert "resumed from runs/run/checkpoints/step_2" in printed
    assert "changed settings" not in printed
    assert {key: frozen(served.folder / "runs/run")["optimizer"][key] for key in CHOSEN} == CHOSEN


@pytest.mark.slow
def test_each_run_of_a_fine_tuning_sweep_freezes_its_defaults(served: Command) -> None:
    rates = ["adapter=null,lora", "train.steps=1", "name=sweep"]
    served("train", "-m", *pretrained(served.folder), *rates)
    contents = [frozen(served.folder / f"runs/sweep/{number}") for number in (0, 1)]
    assert [content["optimizer"]["lr"] for content in contents] == [2e-5, 2e-4]


def test_resumed_run_keeps_the_precision_that_it_began_with(tmp_path: Path) -> None:
    run = ["model=gpt", "model.hidden_size=16", "model.num_hidden_layers=1", "launch.nproc=1"]
    run += ["data=synthetic_tokens", "data.sequence_length=8", "train.steps=2"]
    run += ["checkpoint.every=2", "train.eval_batches=0", f"run_dir={tmp_path}"]
    assert run_config([*run, "train.precision=auto"]).train.precision == "fp32"
    began = run_config([*run, "train.precision=bf16"])
    World.mock(1).run(lambda world: worker.run(began, world))
    (tmp_path / "config.yaml").write_text(to_yaml(began))
    assert run_config([*run, "train.steps=4", "train.precision=auto"]).train.precision == "bf16"
    assert run_config([*run, "train.steps=4", "train.precision=fp32"]).train.precision == "fp32"
