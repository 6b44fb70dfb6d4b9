"""Layouts that a search estimates, and its message if none fits.

Formulas and traces are simulated.
"""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from support.configured import estimate_config
from support.simulated_search import MODEL, found

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.options.hardware import GIB, HardwareConfig
from axonlaunch.engines.pipeline.split import balance
from axonlaunch.planning.memory.pipeline_ranks import stage_layers
from axonlaunch.planning.search import refusals, rounds
from axonlaunch.planning.search.candidates import OFFLOAD_GAIN
from axonlaunch.planning.search.keys import SEARCHED

__all__ = ["found"]


def test_search_estimates_next_layouts_if_fastest_do_not_fit(found: Any) -> None:
    plan = found("hardware.memory_gib=4.5", off=1.5)
    best = plan.candidates[0]
    assert best.fits
    assert best.process_bytes == 3 * GIB  # not the smallest, which is slower
    assert len(plan.candidates) <= rounds.TRIED


def test_plan_predicts_first_layout_with_compiled_blocks_if_that_saves_5_percent(
    found: Any,
) -> None:
    plan = found(compiled_s=0.95)
    first = plan.candidates[0]
    assert plan.compiled.overrides == ["train.compile=true"]
    assert plan.compiled.step_s == 0.95 * first.step_s
    assert found(compiled_s=0.96).compiled is None
    assert found("train.compile=true", compiled_s=0.9).compiled is None


def test_plan_predicts_no_compiled_blocks_if_layout_cannot_compile(found: Any) -> None:
    def check(run: RunConfig) -> RunConfig:
        if run.train.compile:
            raise ConfigError([ConfigIssue("train.compile", "can't be set", True)])
        return run

    assert found(compiled_s=0.5, check=check).compiled is None


def choice(step_s: float, *, rank_factor: float = 1.0) -> Any:
    candidate = SimpleNamespace(rank_factor=rank_factor)
    return SimpleNamespace(step_s=step_s, ranked_s=step_s * rank_factor, candidate=candidate)


@pytest.mark.parametrize(("offloaded_s", "first"), [(0.97, 1.0), (0.94, 0.94)])
def test_layout_that_offloads_is_ranked_first_only_if_it_is_much_faster(
    monkeypatch: pytest.MonkeyPatch, offloaded_s: float, first: float
) -> None:
    monkeypatch.setattr(
        rounds,
        "_trace",
        lambda choices, **_: [(c, SimpleNamespace(step_s=c.step_s)) for c in choices],
    )
    choices = [choice(1.0), choice(offloaded_s, rank_factor=1 + OFFLOAD_GAIN)]
    order = rounds.TracedOrder(choices, hardware=HardwareConfig(name="own"))
    assert next(iter(order))[1].step_s == first


def test_search_traces_only_layouts_that_may_be_next(monkeypatch: pytest.MonkeyPatch) -> None:
    traced_times = {1.0: 2.0, 2.0: 1.7, 3.0: 3.1, 10.0: 10.0}  # by the time of the formula
    traced: list[float] = []

    def trace(choices: list[Any], **_: Any) -> list[Any]:
        traced.extend(choice.step_s for choice in choices)
        return [(c, SimpleNamespace(step_s=traced_times[c.step_s])) for c in choices]

    monkeypatch.setattr(rounds, "_trace", trace)
    monkeypatch.setattr(rounds.forked_map, "share_of_cores", lambda: 1)
    choices: Any = [choice(seconds) for seconds in traced_times]
    order = iter(rounds.TracedOrder(choices, hardware=HardwareConfig(name="own")))
    assert [speed.step_s for _, speed in islice(order, 2)] == [1.7, 2.0]
    assert traced == [1.0, 2.0]
    assert [speed.step_s for _, speed in order] == [3.1, 10.0]


@pytest.mark.parametrize(("limit", "yielded"), [(2.5, [1.2, 2.4]), (2.3, [1.2]), (1.1, [])])
def test_search_traces_no_layout_that_cannot_be_below_a_limit(
    monkeypatch: pytest.MonkeyPatch, limit: float, yielded: list[float]
) -> None:
    traced: list[float] = []

    def trace(choices: list[Any], **_: Any) -> list[Any]:
        traced.extend(choice.step_s for choice in choices)
        return [(c, SimpleNamespace(step_s=1.2 * c.step_s)) for c in choices]

    monkeypatch.setattr(rounds, "_trace", trace)
    monkeypatch.setattr(rounds.forked_map, "share_of_cores", lambda: 1)
    order = rounds.TracedOrder(
        [choice(1.0), choice(2.0), choice(3.0)],
        hardware=HardwareConfig(name="own"),
        ranked_limit=limit,
        least_ratio=1.15,
    )
    assert [speed.step_s for _, speed in order] == yielded
    assert traced == [1.0, 2.0][: len(yielded)]


def test_steps_of_other_numerics_are_assumed_to_be_about_as_slow_as_the_formulas_say() -> None:
    def ratio(traced: float) -> float:
        return rounds.similar_ratio(rounds.Found([], 0.0, 0, traced))

    assert ratio(1.05) == pytest.approx(1.03)
    assert ratio(0.0) == ratio(0.7) == 0.8


@pytest.mark.parametrize(
    ("depth", "stages", "head"),
    [(32, 1, 2.4), (32, 4, 0.0), (32, 4, 2.4), (32, 8, 2.1), (16, 4, 3.2), (80, 16, 1.2)],
)
def test_formulas_divide_layers_among_stages_as_training_does(
    depth: int, stages: int, head: float
) -> None:
    trained = balance([1.0] * depth, num_stages=stages, first=0.0, last=head)
    assert list(stage_layers(depth, stages, head)) == trained


ON_HOST = "strategy.fsdp.cpu_offload=full (updates on the host, whose time plan can't predict)"


def test_search_names_closest_layout_if_no_layout_fits(found: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        found("hardware.memory_gib=1.25", off=1.5)
    [issue] = raised.value.problems
    assert "no layout of 8 devices fits: " in issue.message
    assert ". It takes 1.50 GiB, 0.25 more than a device of 1.25 GiB allows" in issue.message
    assert issue.message.endswith(
        ". A layout is expected to fit with 16 devices, "
        f"{ON_HOST}, --allow low_precision (changes numerics), "
        "data.sequence_length=8 or adapter=lora"
    )


def test_search_names_the_next_batch_that_all_devices_share_if_it_fits_then() -> None:
    tried: Any = SimpleNamespace(
        layout="pipeline 3", process_bytes=90 * GIB, needs_more_host=False, host_memory=None
    )
    issue = refusals.none_fits(
        estimate_config([*MODEL, "launch.nproc=1"]),
        [tried],
        devices=3,
        searched=1,
        fixed={},
        fits=lambda run, devices, fixed: run.train.global_batch_size % 3 == 0,
    )
    assert issue.message.endswith("is expected to fit with train.global_batch_size=18")


def test_search_names_setting_that_prevents_fit(found: Any) -> None:
    key = "strategy.data_parallel"
    assert key in SEARCHED
    with pytest.raises(ConfigError) as raised:
        found("hardware.memory_gib=1.5", off=1.0, **{key: "ddp", "strategy.tensor.degree": 1})
    [issue] = raised.value.problems
    assert ". A layout is expected to fit with removing strategy.data_parallel=ddp" in issue.message


def test_search_names_smallest_change_of_each_kind_if_no_layout_fits(found: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        found("hardware.memory_gib=0.3", "train.precision=bf16", off=1.0)
    [issue] = raised.value.problems
    assert issue.message.endswith(
        ". A layout is expected to fit with 32 devices, "
        f"{ON_HOST}, --allow low_precision (changes numerics), "
        "data.sequence_length=4 or adapter=lora"
    )
    with pytest.raises(ConfigError) as raised:
        found("hardware.memory_gib=0.6", "train.precision=bf16", off=1.0)
    [issue] = raised.value.problems
    assert issue.message.endswith(
        f"with 16 devices, {ON_HOST}, --allow low_precision (changes numerics), "
        "data.sequence_length=8, "
        "train.param_dtype=bf16 or adapter=lora"
    )


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"strategy.tensor.degree": 3}, "strategy.tensor.degree=3: .* use 1, 2 or 4$"),
        ({"train.micro_batch_size": 5}, "train.micro_batch_size=5: .* use 1, 2, 4 or 8$"),
        (
            {"strategy.data_parallel": "ddp", "train.micro_batch_size": 3},
            "train.micro_batch_size=3: .* use 1, 2, 4 or 8$",
        ),
    ],
)
def test_search_names_impossible_setting_with_alternatives(
    found: Any, fixed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        found(off=1.0, **fixed)


@pytest.mark.parametrize(
    ("overrides", "devices", "ranks"),
    [
        (["launch.nnodes=4"], 8, ["launch.nproc=2"]),
        (["launch.nnodes=2"], 16, ["launch.nproc=8"]),
        (["train.global_batch_size=48"], 12, ["launch.nnodes=2", "launch.nproc=6"]),
        (["train.global_batch_size=48"], 6, ["launch.nproc=6"]),
        (
            ["train.global_batch_size=48", "launch.nnodes=3", "launch.nproc=4"],
            12,
            ["launch.nproc=4"],
        ),
    ],
)
def test_plan_sets_nodes_and_ranks(
    found: Any, overrides: list[str], devices: int, ranks: list[str]
) -> None:
    plan = found(*overrides, devices=devices)
    for planned in plan.candidates:
        assert [word for word in planned.overrides if word.startswith("launch.")] == ranks
    assert ranks[-1] == f"launch.nproc={plan.nodes.ranks}"
    assert plan.nodes.count * plan.nodes.ranks == devices


def test_search_names_indivisible_batch(found: Any) -> None:
    with pytest.raises(ConfigError, match=r"train.global_batch_size=16: .* use a multiple of 5$"):
        found(off=1.0, devices=5)
    with pytest.raises(ConfigError, match=r"train.global_batch_size=16: .* use 80$"):
        found(off=1.0, devices=5, **{"strategy.data_parallel": "ddp"})


def test_search_lists_no_layout_that_offloads_and_is_not_faster_than_one_that_fits(
    found: Any,
) -> None:
    plan = found(
        devices=1, **{"train.micro_batch_size": 1, "train.activation_checkpointing": "none"}
    )
    assert [planned.rank_factor for planned in plan.candidates] == [1.0]
