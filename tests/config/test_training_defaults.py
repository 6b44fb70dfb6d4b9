"""Optimizer, schedule and precision default to values that suit what a run trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import axonlaunch
from axonlaunch import config
from axonlaunch.config import flatten, to_tree
from axonlaunch.config.composition.origins import origins_of
from axonlaunch.config.consistency.resumed_settings import settings_unlike_resumed
from axonlaunch.config.consistency.run_precision import with_precision
from axonlaunch.config.optimization.optimizer import INCLUDED_OPTIMIZERS, AdamWConfig
from axonlaunch.config.optimization.schedules import SCHEDULERS, CosineConfig
from axonlaunch.config.optimization.training_defaults import note_on_defaults, training_defaults

PRETRAINED = ["model=hf", "model.path=/models/qwen"]
FINE_TUNING = {
    "optimizer.weight_decay": 0.0,
    "optimizer.betas": [0.9, 0.999],
    "scheduler.warmup_ratio": 0.03,
    "scheduler.final_lr_ratio": 0.0,
    "train.precision": "auto",
}


def values_of(*overrides: str, **options: Any) -> dict[str, Any]:
    return flatten(config.load(overrides, **options))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (PRETRAINED, {"optimizer.lr": 2e-5, **FINE_TUNING}),
        ([*PRETRAINED, "optimizer=null", "scheduler=null"], {"optimizer.lr": 2e-5, **FINE_TUNING}),
        ([*PRETRAINED, "adapter=lora"], {"optimizer.lr": 2e-4, **FINE_TUNING}),
        (["model=gpt", "model.weights=runs/a"], {"optimizer.lr": 2e-5, **FINE_TUNING}),
        (["model=moe_debug", "model.weights=runs/a"], {"optimizer.lr": 2e-5, **FINE_TUNING}),
        (
            ["model=vit", "model.weights=runs/a", "data=digits"],
            {"optimizer.lr": 2e-5, **FINE_TUNING, "train.precision": "fp32"},
        ),
        (
            [*PRETRAINED, "model.init=random"],
            {"optimizer.lr": 3e-4, "optimizer.weight_decay": 0.1, "train.precision": "auto"},
        ),
        (["model=llama3_70b"], {"optimizer.lr": 1.5e-4, "train.precision": "bf16"}),
        (
            ["model=gpt"],
            {
                "optimizer.lr": AdamWConfig.lr,
                "optimizer.betas": list(AdamWConfig.betas),
                "scheduler.final_lr_ratio": CosineConfig.final_lr_ratio,
                "scheduler.warmup_ratio": None,
                "train.precision": "fp32",
            },
        ),
    ],
    ids=[
        "full",
        "no option",
        "adapter",
        "weights",
        "weights of a mixture of experts",
        "images",
        "from scratch",
        "preset",
        "included model",
    ],
)
def test_defaults_depend_on_the_model_and_the_data(
    overrides: list[str], expected: dict[str, Any]
) -> None:
    values = values_of(*overrides)
    assert {key: values[key] for key in expected} == expected


COLUMNS = {
    "all weights of a pretrained model": PRETRAINED,
    "adapter of a pretrained model": [*PRETRAINED, "adapter=lora"],
    "model of transformers from scratch": [*PRETRAINED, "model.init=random"],
    "other models": ["model=gpt"],
}
"""Columns of the page's table, with overrides of such a run."""
A_CLASS = "custom optimizer.target=mine:Adam8bit"
ROWS = {
    "`optimizer.lr`: `adamw`, `adam`, `nadam`, `muon`": ["adamw", "adam", "nadam", "muon"],
    "`lion`": ["lion"],
    "`adafactor`": ["adafactor"],
    "`sgd`": ["sgd"],
    "a class of yours": [A_CLASS],
}
"""Rows of the table with learning rates, with the optimizers that they name."""
OTHER_ROWS = {
    "`optimizer.weight_decay`": "optimizer.weight_decay",
    "`optimizer.betas`": "optimizer.betas",
    "warm-up": "scheduler.warmup_ratio",
    "`scheduler.final_lr_ratio` (`cosine`, `linear`)": "scheduler.final_lr_ratio",
    "`train.precision`": "train.precision",
}
"""The other rows, with their keys."""


def table_of_defaults() -> tuple[list[str], dict[str, list[str]]]:
    """Return the columns of the table on the page, and the cells of each row by its first cell."""
    page = Path(axonlaunch.__file__).parent / "docs" / "configuration.md"
    section = page.read_text().partition("\n## Defaults that depend on the model\n")[2]
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    first, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return first[1:], {row[0]: row[1:] for row in rows}


def shown(key: str, value: Any) -> str:
    """Return how the table writes a value."""
    if key == "scheduler.warmup_ratio":
        return "1/15" if value is None else f"{value:.0%}"
    if key == "train.precision":
        return "that of the preset, else fp32" if value == "fp32" else f"`{value}`"
    return ", ".join(f"{number:g}" for number in (value if isinstance(value, list) else [value]))


def test_table_of_defaults_has_the_values_of_runs() -> None:
    columns, rows = table_of_defaults()
    assert columns == [*COLUMNS]
    assert {*rows} == {*ROWS, *OTHER_ROWS}
    for overrides, column in zip(COLUMNS.values(), range(len(columns)), strict=True):
        for row, optimizers in ROWS.items():
            written = float(rows[row][column].partition(";")[0])
            for optimizer in optimizers:
                values = values_of(*overrides, *f"optimizer={optimizer}".split())
                assert values["optimizer.lr"] == written, (row, columns[column])
        values = values_of(*overrides)
        for row, key in OTHER_ROWS.items():
            cell = rows[row][column].partition(" of the steps")[0].removesuffix(" (`adamw`)")
            assert cell == shown(key, values[key]), (row, columns[column])
    assert "`llama3_8b` 3e-4" in rows[next(iter(ROWS))][-1]
    assert values_of("model=llama3_8b")["optimizer.lr"] == 3e-4


@pytest.mark.parametrize("optimizer", ["adam", "nadam", "muon", "lion", "sgd", A_CLASS])
def test_no_optimizer_decays_weights_in_fine_tuning(optimizer: str) -> None:
    values = values_of(*PRETRAINED, "adapter=lora", *f"optimizer={optimizer}".split())
    assert values.get("optimizer.weight_decay", 0.0) == 0.0


def test_no_included_option_fine_tunes_at_the_defaults_of_training_from_scratch() -> None:
    model = {"name": "hf", "path": "/models/qwen"}
    chosen = {
        name: training_defaults({"model": model, "optimizer": {"name": name}})
        for name in INCLUDED_OPTIMIZERS
    } | {
        name: training_defaults({"model": model, "scheduler": {"name": name}})
        for name in SCHEDULERS.configs().keys() - {"custom"}
    }
    assert {name for name in INCLUDED_OPTIMIZERS if "optimizer.lr" not in chosen[name]} == set()
    schedules = chosen.keys() - INCLUDED_OPTIMIZERS
    assert {name for name in schedules if "scheduler.warmup_ratio" not in chosen[name]} == set()


@pytest.mark.parametrize("scheduler", ["constant", "linear", "wsd"])
def test_each_schedule_of_fine_tuning_warms_up_and_ends_low(scheduler: str) -> None:
    values = values_of(*PRETRAINED, f"scheduler={scheduler}")
    assert values["scheduler.warmup_ratio"] == 0.03
    assert values.get("scheduler.final_lr_ratio", 0.0) == 0.0


def test_settings_of_the_user_are_kept_when_fine_tuning(tmp_path: Path) -> None:
    for folder, text in {
        "experiment/mine.yaml": "# @package _global_\noptimizer:\n  weight_decay: 0.02\n",
        "scheduler/slow.yaml": "name: cosine\nfinal_lr_ratio: 0.5\nwarmup_steps: 7\n",
    }.items():
        (tmp_path / folder).parent.mkdir()
        (tmp_path / folder).write_text(text)
    chosen = ["experiment=mine", "scheduler=slow", "optimizer.lr=1e-3", "train.precision=fp32"]
    values = values_of(*PRETRAINED, *chosen, config_dirs=[tmp_path])
    assert values["optimizer.lr"] == 1e-3
    assert values["optimizer.weight_decay"] == 0.02
    assert values["optimizer.betas"] == [0.9, 0.999]
    assert values["scheduler.final_lr_ratio"] == 0.5
    assert values["scheduler.warmup_steps"] == 7
    assert values["scheduler.warmup_ratio"] is None
    assert values["train.precision"] == "fp32"


def test_the_usual_value_stays_when_the_user_writes_it_for_fine_tuning() -> None:
    values = values_of(*PRETRAINED, f"optimizer.lr={AdamWConfig.lr}", "optimizer.betas=[0.9,0.95]")
    assert values["optimizer.lr"] == AdamWConfig.lr
    assert values["optimizer.betas"] == [0.9, 0.95]


def test_origins_name_the_reason_of_a_chosen_default() -> None:
    composed = config.compose([*PRETRAINED, "scheduler.final_lr_ratio=0.2"])
    origins = origins_of(composed, config.load([*PRETRAINED, "scheduler.final_lr_ratio=0.2"]))
    assert origins["optimizer.lr"] == "default for full fine-tuning"
    assert origins["scheduler.final_lr_ratio"] == "override scheduler.final_lr_ratio=0.2"
    assert origins["optimizer.eps"] == "default"


def test_each_run_of_a_sweep_has_the_defaults_that_suit_it() -> None:
    sweep = config.composer_of().sweep([*PRETRAINED, "optimizer=adamw,sgd", "adapter=null,lora"])
    rates = [values_of(*overrides)["optimizer.lr"] for overrides in sweep]
    assert rates == [2e-5, 2e-4, 1e-2, 1e-2]


@pytest.mark.parametrize(
    ("overrides", "precision"),
    [
        ([], "bf16"),
        (["launch.device=cpu"], "fp32"),
        (["launch.backend=gloo"], "fp32"),
        (["hardware=cpu"], "fp32"),
        (["hardware=h100_80gb"], "bf16"),
        (["hardware=h100_80gb", "hardware.bf16_tflops=null"], "fp32"),
        (["launch.device=cpu", "train.param_dtype=bf16"], "bf16"),
        (["train.param_dtype=fp16", "optimizer.master_weights=fp32"], "fp16"),
        (["train.precision=fp16"], "fp16"),
    ],
)
def test_automatic_precision_is_bf16_where_the_device_has_it(
    overrides: list[str], precision: str
) -> None:
    assert with_precision(config.load([*PRETRAINED, *overrides])).train.precision == precision


def test_precision_of_a_run_follows_its_devices() -> None:
    loaded = config.load(PRETRAINED)
    assert with_precision(loaded, has_bf16=False).train.precision == "fp32"
    assert with_precision(loaded, has_bf16=True).train.precision == "bf16"


def test_automatic_precision_is_not_a_changed_setting() -> None:
    loaded = config.load(PRETRAINED)
    frozen = {**flatten(to_tree(loaded)), "train.precision": "bf16"}
    assert settings_unlike_resumed(loaded, frozen) == []
    changed = config.with_values(loaded, {"train.precision": "fp32"})
    assert settings_unlike_resumed(changed, frozen) == ["train.precision=fp32 (was bf16)"]


def test_the_start_of_a_run_says_its_chosen_defaults() -> None:
    loaded = config.load([*PRETRAINED, "launch.device=cpu", "scheduler=constant"])
    note = note_on_defaults(to_tree(with_precision(loaded)))
    assert note == (
        "optimizer.lr=2e-05, the default for full fine-tuning; also optimizer.weight_decay=0.0, "
        "optimizer.betas=[0.9,0.999], scheduler.warmup_ratio=0.03, train.precision=fp32 (on a CPU)"
    )
    mine = config.load([*PRETRAINED, "launch.device=cpu", "optimizer.lr=1"])
    assert "optimizer.lr" not in note_on_defaults(to_tree(with_precision(mine)))
    assert note_on_defaults(to_tree(config.load(["model=gpt"]))) == ""


def test_data_without_held_out_samples_is_not_evaluated() -> None:
    chat = ["data=chat", "data.files=rows.jsonl"]
    assert config.load([*chat, "data.held_out=0"]).train.eval_batches == 0
    assert config.load(chat).train.eval_batches == 16
    kept = config.load([*chat, "data.held_out=0", "train.eval_batches=3"])
    assert kept.train.eval_batches == 3  # refused when the data is read
    mix = ["data=documents", "data.mix={a: {files: a.jsonl, held_out: 0.1}, b: {files: b.jsonl}}"]
    assert config.load([*mix, "data.held_out=0"]).train.eval_batches == 16
    with_split = ["data=chat", "data.files=org/rows", "data.validation_split=test"]
    assert config.load([*with_split, "data.held_out=0"]).train.eval_batches == 16


def test_one_text_is_a_list_of_one() -> None:
    assert config.load(["data=text", "data.files=notes.txt"]).data.files == ["notes.txt"]  # type: ignore[attr-defined]
    chat = config.load(["data=chat", "data.files=*.jsonl", "data.held_out=eval.jsonl"]).data
    assert (chat.files, chat.held_out) == (["*.jsonl"], ["eval.jsonl"])  # type: ignore[attr-defined]
    lora = config.load(["adapter=lora", "adapter.targets=q_proj"]).adapter
    assert lora is not None
    assert lora.targets == ["q_proj"]


@pytest.mark.parametrize(
    ("steps", "every"), [(1, 1), (9, 1), (20, 2), (99, 9), (100, 10), (10_000, 10)]
)
def test_short_runs_log_at_least_ten_steps(steps: int, every: int) -> None:
    assert config.load([f"train.steps={steps}"]).train.steps_per_log == every
    assert config.load([f"train.steps={steps}", "train.log_every=7"]).train.steps_per_log == 7
