"""Plans that change numerics: which settings ``plan --allow low_precision`` searches and marks."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support.configured import estimate_config
from support.simulated_search import MODEL, found

from axonlaunch import config
from axonlaunch.cli.planning.plan import plan_to_json, print_plan
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.consistency.rules import find_rule_violations
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.records import Plan
from axonlaunch.planning.search import planned_layouts, search
from axonlaunch.planning.search.candidates import Candidate, candidates
from axonlaunch.planning.search.low_precision import (
    lower_layouts,
    master_settings,
    product_changes,
    slowness,
)
from axonlaunch.preflight.checks import resolve_anywhere

__all__ = ["found"]

SMALL: dict[str, Any] = {
    "devices": 2,
    "strategy.tensor.degree": 1,
    "strategy.pipeline.degree": 1,
}
BF16 = ["train.precision=bf16", *MODEL, "model.hidden_size=64"]
STATES = "8-bit optimizer states"
MASTERS = "bf16 weights with fp32 masters"


def listed(*overrides: str, devices: int = 2, kept: Sequence[str] = ()) -> Any:
    def layouts(run: RunConfig) -> Iterable[Candidate]:
        return candidates(run, devices=devices, in_node=devices, fixed={})

    return lower_layouts(config.load([*BF16, *overrides]), kept, layouts)


def test_lower_precision_is_searched_only_if_allowed(found: Any) -> None:
    room = "hardware.memory_gib=2.4"
    with pytest.raises(ConfigError) as raised:
        found(*BF16, room, **SMALL)
    [issue] = raised.value.problems
    assert "A layout is expected to fit with 4 devices, " in issue.message
    assert ", --allow low_precision (changes numerics), " in issue.message
    plan = found(*BF16, room, lowers=True, **SMALL)
    assert plan.candidates[0].fits
    for planned in plan.candidates:
        assert planned.fits == (STATES in planned.numerics)
        assert planned.fits == ("optimizer.state_dtype=8bit" in planned.overrides)
        assert planned.layout.endswith(", ".join(planned.numerics))


def test_frozen_weights_of_an_adapter_are_in_16_bits_without_masters() -> None:
    layouts, _ = listed("adapter=lora")
    [frozen] = {n for each in layouts for n in each.numerics if "weights" in n}
    assert frozen == "bf16 frozen weights"
    alone = [each for each in layouts if each.numerics == (frozen,)]
    assert any(each.layout.facts.shards_parameters for each in alone)
    assert all(each.config.train.param_dtype == "bf16" for each in alone)


def test_layouts_of_lower_precision_come_with_fastest_exact_layout(found: Any) -> None:
    exact = found(*BF16, **SMALL).candidates
    assert not any(planned.numerics for planned in exact)
    plan = found(*BF16, lowers=True, **SMALL)
    assert any(name.startswith("fp8") for name in plan.candidates[0].numerics)
    assert exact[0] in plan.candidates
    limit = 0.99 * exact[0].step_s
    assert all(planned.step_s < limit for planned in plan.candidates if planned.numerics)


def test_slower_layouts_of_lower_precision_are_left_out(found: Any) -> None:
    kept = ["train.matmul_dtype"]
    plan = found(*BF16, lowers=True, kept=kept, **SMALL)
    assert plan.candidates == found(*BF16, **SMALL).candidates
    assert plan.searched > found(*BF16, **SMALL).searched


def test_only_products_that_are_the_fastest_of_a_layout_are_combined_with_other_changes(
    found: Any,
) -> None:
    plan = found(*BF16, lowers=True, **SMALL)  # all products in fp8 take the same time
    slower = "train.matmul_dtype=fp8_rowwise: is not the fastest choice for any layout"
    assert plan.not_tried == (slower,)
    searched = [name for each in plan.candidates for name in each.numerics]
    assert "fp8_tensorwise products" in searched
    assert "fp8_rowwise products" not in searched


def test_products_that_are_slow_because_nothing_is_compiled_are_explained() -> None:
    run = config.load(BF16)
    changes = product_changes(run, [])
    reason = "because roundings are fused only with train.compile=true"
    assert [reason in str(each) for each in slowness(run, changes, changes)] == [True, True]
    assert reason not in str(slowness(run, changes, changes[1:])[0])
    compiled = config.load([*BF16, "train.compile=true"])
    assert reason not in str(slowness(compiled, changes, changes)[0])


def test_useless_layouts_of_lower_precision_are_not_estimated(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimated: list[RunConfig] = []
    monkeypatch.setattr(planned_layouts, "host_memory", lambda run, _: estimated.append(run))
    found(*BF16, **SMALL)
    exact = len(estimated)
    assert exact
    found(*BF16, lowers=True, kept=["train.matmul_dtype"], **SMALL)
    assert len(estimated) == 2 * exact


def test_refusal_says_why_changes_of_numerics_were_not_searched(found: Any) -> None:
    refused = r"\. Not searched: .*optimizer.state_dtype=8bit: optimizer=adafactor updates full"
    with pytest.raises(ConfigError, match=refused):
        found(*BF16, "optimizer=adafactor", "hardware.memory_gib=0.01", lowers=True, **SMALL)


def test_optimizer_without_masters_gets_no_master_settings() -> None:
    run = config.load(BF16)
    assert master_settings(run)
    registered: Any = SimpleNamespace(name="registered")
    assert master_settings(dataclasses.replace(run, optimizer=registered)) == {}


def test_layouts_of_lower_precision_are_valid() -> None:
    layouts, problems = listed()
    assert problems == []
    numerics = {c.numerics for c in layouts}
    assert len(numerics) == 2 * 2 * 3 - 1
    for candidate in layouts:
        assert find_rule_violations(candidate.config) == []
        if MASTERS in candidate.numerics:
            assert not candidate.layout.facts.shards_parameters


@pytest.mark.parametrize(
    ("overrides", "kept", "problem"),
    [
        (["hardware=a100_80gb"], [], "train.matmul_dtype=fp8_tensorwise: hardware=a100_80gb has"),
        (["hardware=cpu"], [], "train.matmul_dtype=fp8_tensorwise: hardware=cpu has no fp8"),
        (
            [
                *["strategy=tensor", "strategy.tensor.async_collectives=true", "launch.nproc=2"],
                "train.compile=true",
                "strategy.tensor.sequence_parallel=true",
            ],
            [],
            "strategy.tensor.async_collectives=true: torch overlaps no products of rounded",
        ),
        (["model.hidden_size=40"], [], "train.matmul_dtype=fp8_tensorwise: "),
        (
            ["optimizer=adafactor"],
            [],
            "optimizer.state_dtype=8bit: optimizer=adafactor updates full",
        ),
        (["train.precision=fp32"], [], ""),
        (["adapter=lora"], [], ""),  # its frozen weights need no masters
        ([], ["optimizer.state_dtype"], ""),
        (["train.matmul_dtype=fp8_rowwise"], [], ""),
    ],
)
def test_changes_that_a_run_cannot_use_are_named(
    overrides: list[str], kept: list[str], problem: str
) -> None:
    layouts, problems = listed(*overrides, kept=kept)
    assert any(str(each).startswith(problem) for each in problems) if problem else not problems
    names = {name for candidate in layouts for name in candidate.numerics}
    settings = {key for candidate in layouts for key in candidate.settings}
    for each in problems:
        assert each.key not in settings
    assert settings.isdisjoint(kept)
    assert len({each.message for each in problems}) == len(problems)
    if "train.precision=fp32" in overrides:
        assert not any("masters" in name for name in names)
    if "train.matmul_dtype=fp8_rowwise" in overrides:
        assert names == {MASTERS, STATES}


def test_tensor_ranks_never_cut_blocks_of_states() -> None:
    layouts, _ = listed("model.intermediate_size=192", "model=llama_debug")
    tensor = {c.layout.tensor for c in layouts if STATES in c.numerics}
    assert tensor == {1}
    assert {c.layout.tensor for c in layouts} > tensor


def test_table_and_json_mark_changes_of_numerics(found: Any) -> None:
    plan, stream = found(*BF16, lowers=True, **SMALL), io.StringIO()
    print_plan(plan, Console(file=stream, width=100), seconds=1.0)
    text = stream.getvalue()
    assert "note layouts with * change the numerics of the run: losses will differ" in text
    for number, planned in enumerate(plan.candidates, 1):
        row = next(line for line in text.splitlines() if line.startswith(f"{number}"))
        assert row.startswith(f"{number}*") == bool(planned.numerics)
    reported = plan_to_json(plan, 1.0)["candidates"]
    assert reported[0]["numerics"] == ["fp8_tensorwise products"]
    assert [] in [each["numerics"] for each in reported]


REAL = [
    *("model=llama_debug", "model.hidden_size=2048", "model.intermediate_size=8192"),
    *("model.num_hidden_layers=8", "model.num_attention_heads=16", "train.precision=bf16"),
    *("model.num_key_value_heads=16", "data=synthetic_tokens", "data.sequence_length=1024"),
    *("train.global_batch_size=4", "hardware=h100_80gb"),
]


def real_plan(*overrides: str, kept: Sequence[str]) -> Plan:
    return search.search_layouts(
        config.load([*REAL, *overrides]),
        devices=1,
        fixed={"train.micro_batch_size": 4, "train.activation_checkpointing": "none"},
        check=resolve_anywhere,
        wanted=1,
        lowers=True,
        kept=kept,
    )


@pytest.mark.slow
@pytest.mark.processes
def test_traced_run_fits_only_with_states_in_8_bits() -> None:
    room = ["hardware.memory_gib=10"]
    plan = real_plan(*room, kept=["train.matmul_dtype", "optimizer.master_weights"])
    best, exact = plan.candidates
    assert (best.numerics, exact.numerics) == ([STATES], [])
    assert best.fits
    assert not exact.fits
    overrides = [*REAL, *room, *best.overrides]
    assert estimate(estimate_config(overrides)).peak_bytes == best.peak_bytes


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")  # torch's compiler imports deprecated parts of torch
def test_traced_run_is_faster_in_fp8() -> None:
    others = ["optimizer.state_dtype", "optimizer.master_weights"]
    # Rows of many tokens, because rounding the weights takes as long for few.
    long = ["data.sequence_length=4096", "model.max_position_embeddings=4096"]
    plan = real_plan("train.compile=true", *long, kept=others)
    first, exact = plan.candidates[0], next(p for p in plan.candidates if not p.numerics)
    assert any(name.startswith("fp8") for name in first.numerics)
    assert first.step_s < exact.step_s
    assert first.breakdown["matrix products"] < 0.7 * exact.breakdown["matrix products"]
