"""Which layouts a search estimates, and its message if none fits; formulas and traces are
simulated.

By formulas a layout holds 8 GiB over the ranks that divide it; estimates are a factor above that.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from axonlaunch import config
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.options.hardware import GIB
from axonlaunch.engines.pipeline.split import balance
from axonlaunch.planning.records import Plan
from axonlaunch.planning.search import search
from axonlaunch.planning.search.keys import SEARCHED

MODEL = [
    *("model.hidden_size=32", "model.num_hidden_layers=4", "model.num_attention_heads=4"),
    *("data=synthetic_tokens", "data.sequence_length=16", "train.global_batch_size=16"),
    *("hardware=h100_80gb", "estimate.margin=0"),
]


def size(run: RunConfig, layout: Layout) -> float:
    shards = layout.axes["dp_shard"] if layout.facts.shards_parameters else 1
    smaller = (run.sequence_length or 0) / 16 * run.train.parameter_bytes / 4
    if run.adapter is not None:
        smaller /= 8
    return 8 * GIB * smaller / (shards * layout.tensor * layout.pipeline)


class Speed:
    """Each division costs time: the layouts with the most memory are the fastest."""

    def __init__(self, run: RunConfig, layout: Layout, hardware: object) -> None:
        self.step_s = GIB / size(run, layout)

    def approximate(self, work: object) -> float:
        return self.step_s


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Search with estimates that are ``off`` times the formulas."""

    def find(*overrides: str, devices: int = 8, off: float, **fixed: Any) -> Plan:
        def timed(first: Any, **_: Any) -> list[Any]:
            speeds = [
                SimpleNamespace(
                    step_s=choice.step_s, tokens_per_s_per_device=1.0, mfu=0.1, breakdown={}
                )
                for choice in first
            ]
            return [*zip(first, speeds, strict=True)]

        def estimate(run: RunConfig, **_: Any) -> Any:
            num_bytes = int(off * size(run, Layout.of(run, world_size=devices)))
            return SimpleNamespace(
                peak_bytes=num_bytes, process_bytes=num_bytes, host_bytes=0, saved_bytes=0
            )

        formulas = SimpleNamespace(
            process_bytes=size,
            single_device=SimpleNamespace(layers=(4,)),
            experts=lambda *_: None,
            head_layers=0.5,
        )
        monkeypatch.setattr(search.Formulas, "of", lambda run: formulas)
        monkeypatch.setattr(search, "scaled", lambda *_, **__: None)
        monkeypatch.setattr(search, "StepTime", Speed)
        monkeypatch.setattr(search, "_fastest", timed)
        monkeypatch.setattr(search, "estimate", estimate)
        run = config.load([*MODEL, *overrides, *(f"{k}={v}" for k, v in fixed.items())])
        return search.search_layouts(
            run, devices=devices, fixed=fixed, check=lambda checked: checked
        )

    return find


def test_search_estimates_next_layouts_if_fastest_do_not_fit(found: Any) -> None:
    plan = found("hardware.memory_gib=4.5", off=1.5)
    best = plan.candidates[0]
    assert best.fits
    assert best.process_bytes == 3 * GIB  # not the smallest, which is slower
    assert len(plan.candidates) <= search.TRIED


@pytest.mark.parametrize(
    ("depth", "stages", "head"),
    [(32, 1, 2.4), (32, 4, 0.0), (32, 4, 2.4), (32, 8, 2.1), (16, 4, 3.2), (80, 16, 1.2)],
)
def test_formulas_divide_layers_among_stages_as_training_does(
    depth: int, stages: int, head: float
) -> None:
    trained = balance([1.0] * depth, num_stages=stages, first=0.0, last=head)
    assert list(search._layers(depth, stages, head)) == trained


def test_search_names_closest_layout_if_no_layout_fits(found: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        found("hardware.memory_gib=1.25", off=1.5)
    [issue] = raised.value.problems
    assert "no layout of 8 devices fits: " in issue.message
    assert "takes 1.50 GiB, 0.25 more than a device of 1.25 GiB allows" in issue.message
    assert issue.message.endswith(
        "; a layout is expected to fit with data.sequence_length=8, adapter=lora or 16 devices"
    )


def test_search_names_setting_that_prevents_fit(found: Any) -> None:
    key = "strategy.data_parallel"
    assert key in SEARCHED
    with pytest.raises(ConfigError) as raised:
        found("hardware.memory_gib=1.5", off=1.0, **{key: "ddp", "strategy.tensor.degree": 1})
    [issue] = raised.value.problems
    assert "; a layout is expected to fit with removing strategy.data_parallel=ddp" in issue.message


def test_search_names_smallest_change_of_each_kind_if_no_layout_fits(found: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        found("hardware.memory_gib=0.3", "train.precision=bf16", off=1.0)
    [issue] = raised.value.problems
    assert issue.message.endswith(
        "; a layout is expected to fit with data.sequence_length=4, adapter=lora or 32 devices"
    )
    with pytest.raises(ConfigError) as raised:
        found("hardware.memory_gib=0.6", "train.precision=bf16", off=1.0)
    [issue] = raised.value.problems
    assert issue.message.endswith(
        "with data.sequence_length=8, train.param_dtype=bf16, adapter=lora or 16 devices"
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


def test_search_names_indivisible_batch(found: Any) -> None:
    with pytest.raises(ConfigError, match=r"train.global_batch_size=16: .* use a multiple of 5$"):
        found(off=1.0, devices=5)
    with pytest.raises(ConfigError, match=r"train.global_batch_size=16: .* use 80$"):
        found(off=1.0, devices=5, **{"strategy.data_parallel": "ddp"})
