"""Settings that ``plan`` passes to its search, and the rules that it leaves to the search."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from axonlaunch import config
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.planning import plan
from axonlaunch.planning.records import Plan
from axonlaunch.planning.reports.workload import workload
from axonlaunch.planning.search import search
from axonlaunch.planning.search.assumed_figures import with_assumed_figures
from axonlaunch.system.processes import forked_call, forkserver

MODEL = ["data=synthetic_tokens", "data.sequence_length=16", "hardware=h100_80gb"]
Patch = pytest.MonkeyPatch


def arguments_of_search(monkeypatch: Patch, *overrides: str) -> tuple[dict[str, Any], list[str]]:
    """Return the layout settings and the keys of precision that the search keeps."""
    handed: list[tuple[dict[str, Any], list[str]]] = []

    def call(context: object, target: str, run: Any, *arguments: Any, task: str) -> Plan:
        _, layout, _, _, kept = arguments
        handed.append((layout, kept))
        return Plan(workload(run, searched=True), 0, [])

    monkeypatch.setattr(forked_call, "call", call)
    context = cast("Any", None)
    plan.plan_run(context, [*MODEL, *overrides], devices=4, config_name="config", config_dirs=[])
    return handed[0]


def fixed(monkeypatch: Patch, *overrides: str) -> dict[str, Any]:
    return arguments_of_search(monkeypatch, *overrides)[0]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("strategy.pipeline.schedule=gpipe", "gpipe"),
        ("strategy.tensor.sequence_parallel=true", True),
        ("strategy.fsdp.cpu_offload=params", "params"),
        ("strategy.fsdp.sharding=no_shard", "no_shard"),
    ],
)
def test_plan_defers_dependent_settings(override: str, value: object, monkeypatch: Patch) -> None:
    assert fixed(monkeypatch, override) == {override.partition("=")[0]: value}
    with pytest.raises(ConfigError):
        config.load([*MODEL, override])


def test_plan_keeps_settings_of_experiment() -> None:
    composed = config.compose(["experiment=qwen3_moe", "strategy.tensor.degree=2"])
    keys = ["train.micro_batch_size", "train.activation_checkpointing"]
    degrees = ["strategy.expert.degree", "strategy.tensor.degree"]
    assert {*plan.fixed_keys(composed)} == {*keys, *degrees}


def test_plan_keeps_settings_of_files_of_the_user(tmp_path: Path) -> None:
    layout = "strategy:\n  tensor:\n    degree: 2\n"
    (tmp_path / "experiment").mkdir()
    (tmp_path / "strategy").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\n{layout}")
    (tmp_path / "strategy/mine.yaml").write_text("tensor:\n  degree: 2\n")
    (tmp_path / "primary.yaml").write_text(f"defaults:\n- config\n- _self_\n{layout}")

    def keys(*overrides: str, name: str = "config") -> list[str]:
        composed = config.compose(overrides, config_name=name, config_dirs=[tmp_path])
        assert composed.tree["strategy"]["tensor"]["degree"] == 2
        return plan.fixed_keys(composed)

    assert keys("experiment=mine") == ["strategy.tensor.degree"]
    assert keys(name="primary") == ["strategy.tensor.degree"]
    assert keys("strategy=mine") == []


def test_plan_keeps_precision_of_the_user_without_allow(monkeypatch: Patch) -> None:
    precision = ["train.param_dtype=fp32", "optimizer.state_dtype=fp32"]
    _, kept = arguments_of_search(monkeypatch, *precision)
    assert {*kept} == {"train.param_dtype", "optimizer.state_dtype"}


def test_unpublished_figures_are_assumed_and_reported() -> None:
    hardware = config.load(["hardware=rtx4090"]).hardware
    assert hardware is not None
    completed, assumed = with_assumed_figures(hardware, devices=4)
    assert assumed == {
        "hardware.matrix_efficiency": 0.79,
        "hardware.attention_efficiency": 0.58,
        "hardware.link_efficiency": 0.8,
        "hardware.devices_per_node": 4,
    }
    assert (completed.matrix_efficiency, completed.devices_per_node) == (0.79, 4)
    _, of_many = with_assumed_figures(hardware, devices=16)
    assert "hardware.devices_per_node" not in of_many


def test_figures_that_are_published_are_kept() -> None:
    hardware = config.load(["hardware=h100_80gb"]).hardware
    assert hardware is not None
    assert with_assumed_figures(hardware, devices=4) == (hardware, {})


def test_plan_does_not_fix_open_settings(monkeypatch: Patch) -> None:
    open_ = ["train.micro_batch_size=auto", "strategy.data_parallel=null"]
    assert fixed(monkeypatch, *open_) == {}
    assert fixed(monkeypatch, "train.loss_chunk=null") == {"train.loss_chunk": None}


def test_plan_checks_other_rules_before_search(monkeypatch: Patch) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\.master_weights=fp32: "):
        fixed(monkeypatch, "optimizer.master_weights=fp32")


def test_plan_excludes_invalid_layouts(monkeypatch: Patch) -> None:
    """For example, compiled blocks with a schedule that computes weight gradients separately."""
    checks: list[Any] = []

    def searched(run: RunConfig, *, check: Any, **_: Any) -> None:
        checks.append(check)

    monkeypatch.setattr(search, "search_layouts", searched)
    monkeypatch.setattr(forkserver, "lead_group", lambda: None)
    run = config.load([*MODEL, "train.compile=true"])
    plan.search(run, 4, {}, 3, False, [])
    layout = {
        "strategy.pipeline.degree": 2,
        "strategy.pipeline.schedule": "zbv_zero_bubble",
        "launch.nproc": 2,
    }
    with pytest.raises(ConfigError, match="computes weight gradients separately"):
        checks[0](config.with_values(run, layout))
