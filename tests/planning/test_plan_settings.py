"""Settings that ``plan`` passes to its search, and the rules that it leaves to the search."""

from __future__ import annotations

from typing import Any, cast

import pytest

from axonlaunch import config
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.planning import plan
from axonlaunch.planning.records import Plan
from axonlaunch.planning.search import search
from axonlaunch.planning.search.assumed_figures import with_assumed_figures
from axonlaunch.planning.search.workload import workload
from axonlaunch.system.processes import forked_call, forkserver

MODEL = ["data=synthetic_tokens", "data.sequence_length=16", "hardware=h100_80gb"]
Patch = pytest.MonkeyPatch


def fixed(monkeypatch: Patch, *overrides: str) -> dict[str, Any]:
    handed: list[dict[str, Any]] = []

    def call(context: object, target: str, run: Any, *arguments: Any, task: str) -> Plan:
        _, keys, *_ = arguments
        handed.append(keys)
        return Plan(workload(run, searched=True), 0, [])

    monkeypatch.setattr(forked_call, "call", call)
    context = cast("Any", None)
    plan.plan_run(context, [*MODEL, *overrides], devices=4, config_name="config", config_dirs=[])
    return handed[0]


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
    composed = config.compose(["experiment=llama3_8b", "strategy.tensor.degree=2"])
    keys = ["train.micro_batch_size", "train.activation_checkpointing", "strategy.tensor.degree"]
    assert {*plan.fixed_keys(composed)} == {*keys}


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


def test_plan_checks_other_rules_before_search(monkeypatch: Patch) -> None:
    with pytest.raises(ConfigError, match=r"^strategy\.pipeline\.stages_per_rank=2: "):
        fixed(monkeypatch, "strategy.pipeline.stages_per_rank=2")


def test_plan_excludes_invalid_layouts(monkeypatch: Patch) -> None:
    """For example, full recomputation of compiled blocks with divided layers."""
    checks: list[Any] = []

    def searched(run: RunConfig, *, check: Any, **_: Any) -> None:
        checks.append(check)

    monkeypatch.setattr(search, "search_layouts", searched)
    monkeypatch.setattr(forkserver, "lead_group", lambda: None)
    run = config.load([*MODEL, "train.compile=true"])
    plan.search(run, 4, {}, 3, False, [])
    layout = {
        "strategy.tensor.degree": 2,
        "train.activation_checkpointing": "full",
        "launch.nproc": 2,
    }
    with pytest.raises(ConfigError, match="can't recompute layers"):
        checks[0](config.with_values(run, layout))
