"""Settings that ``plan`` passes to its search, and the rules that it leaves to the search."""

from __future__ import annotations

from typing import Any, cast

import pytest

from axonlaunch import config
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.planning import plan
from axonlaunch.planning.search import search
from axonlaunch.system.processes import forked_call, forkserver

MODEL = ["data=synthetic_tokens", "data.sequence_length=16", "hardware=h100_80gb"]
Patch = pytest.MonkeyPatch


def fixed(monkeypatch: Patch, *overrides: str) -> dict[str, Any]:
    handed: list[dict[str, Any]] = []

    def call(context: object, target: str, run: Any, *arguments: Any, task: str) -> None:
        _, keys, _ = arguments
        handed.append(keys)

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
    plan.search(run, 4, {}, 3)
    layout = {
        "strategy.tensor.degree": 2,
        "train.activation_checkpointing": "full",
        "launch.nproc": 2,
    }
    with pytest.raises(ConfigError, match="can't recompute layers"):
        checks[0](config.with_values(run, layout))
