"""``axonlaunch convert``: its output, status and errors, and a run of what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from support.command import Command

pytest.importorskip("transformers")

SOURCE = {
    "base_model": "org/base",
    "datasets": [{"path": "rows.jsonl", "type": "completion"}],
    "sequence_len": 32,
    "sample_packing": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "optimizer": "adamw_torch",
    "saves_per_epoch": 0,
}
TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "vocab_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def write(folder: Path, **changed: object) -> None:
    (folder / "other.yml").write_text(yaml.safe_dump({**SOURCE, **changed}))


@pytest.mark.slow
def test_a_converted_experiment_trains(axonlaunch: Command) -> None:
    write(axonlaunch.folder)
    rows = "".join(json.dumps({"text": f"row {n} " * 8}) + "\n" for n in range(40))
    (axonlaunch.folder / "rows.jsonl").write_text(rows)
    written = axonlaunch("convert", "other.yml", "--output", "mine/experiment/other.yaml")
    assert written.stdout == "axonlaunch train --config-dir mine experiment=other\n"
    config = "{" + ",".join(f"{key}:{value}" for key, value in TINY.items()) + "}"
    axonlaunch(
        *("train", "--config-dir", "mine", "experiment=other", "name=other"),
        *("model.path=null", f"model.config={config}", "model.init=random", "tokenizer=bytes"),
        *("strategy=single", "launch.backend=mock", "estimate.background=false"),
    )
    summary = json.loads((axonlaunch.folder / "runs" / "other" / "summary.json").read_text())
    assert summary["steps"] == 2


def test_the_status_says_whether_training_differs(axonlaunch: Command) -> None:
    write(axonlaunch.folder, rl="dpo")
    printed = axonlaunch("convert", "other.yml", status=1)
    assert printed.stderr.splitlines() == [
        "left out: rl=dpo: losses for preferences, rewards and reinforcement learning are not "
        "supported; use trl, or train.loss with a loss of yours",
        "axolotl: 11 keys translated, 0 not needed, 1 left out, 0 unknown",
    ]
    assert yaml.safe_load(printed.stdout)["model"] == {"path": "org/base", "router_aux_loss": False}
    write(axonlaunch.folder)
    assert axonlaunch("convert", "other.yml").stderr.count("\n") == 1


def test_json_has_the_experiment_and_the_outcome_of_each_key(axonlaunch: Command) -> None:
    write(axonlaunch.folder, odd=1, strict=False)
    printed = json.loads(axonlaunch("convert", "other.yml", "--json", status=1).stdout)
    assert printed["from"] == "axolotl"
    assert "learning_rate" in printed["expressed"]
    assert printed["not_needed"] == ["strict"]
    assert [remark["key"] for remark in printed["remarks"]] == ["odd"]
    assert yaml.safe_load(printed["experiment"])["optimizer"]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["none.yml"], "none.yml: No such file or directory"),
        (["other.yml", "--from", "axolot"], "there is no tool 'axolot'; did you mean axolotl?"),
        (["other.yml", "--devices", "0"], "--devices=0: must be 1 or more"),
        (["other.yml", "--output", "a.txt"], "--output=a.txt: must end in .yaml"),
        (["other.yml", "--output", "a.yaml"], "write experiment/a.yaml"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], error: str, axonlaunch: Command) -> None:
    write(axonlaunch.folder)
    printed = axonlaunch("convert", *arguments, status=2)
    assert error in printed.stderr
    assert printed.stderr.count("\n") == 1
    assert printed.stdout == ""


def test_an_existing_file_is_kept(axonlaunch: Command) -> None:
    write(axonlaunch.folder)
    kept = axonlaunch.folder / "experiment" / "mine.yaml"
    kept.parent.mkdir()
    kept.write_text("mine")
    printed = axonlaunch("convert", "other.yml", "--output", "experiment/mine.yaml", status=2)
    assert "already exists; give another name, or remove it" in printed.stderr
    assert kept.read_text() == "mine"
