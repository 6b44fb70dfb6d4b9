"""A search for layouts with simulated formulas and traces.

By formulas a layout holds 8 GiB over the ranks that divide it; estimates are a factor above that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from axonlaunch import config
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.options.hardware import GIB
from axonlaunch.config.precision import quantizes_states
from axonlaunch.planning.records import Plan
from axonlaunch.planning.search import preselection, rounds, search

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
    if quantizes_states(run.optimizer):
        smaller /= 2
    if run.strategy.fsdp.cpu_offload == "full":
        smaller /= 16
    return 8 * GIB * smaller / (shards * layout.tensor * layout.pipeline)


class Speed:
    """Each division costs time: the layouts with the most memory are the fastest."""

    def __init__(self, run: RunConfig, layout: Layout, hardware: object) -> None:
        self.step_s = GIB / size(run, layout) * (0.7 if run.train.matmul_dtype else 1)

    def approximate(self, work: object) -> float:
        return self.step_s


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Search with estimates that are ``off`` times the formulas.

    ``compiled_s`` is the time of compiled steps relative to others. ``check`` may raise errors.
    """

    def find(
        *overrides: str,
        devices: int = 8,
        off: float = 1.0,
        lowers: bool = False,
        kept: Sequence[str] = (),
        compiled_s: float = 1.0,
        check: Callable[[RunConfig], RunConfig] = lambda checked: checked,
        **fixed: Any,
    ) -> Plan:
        def timed(first: Any, **_: Any) -> list[Any]:
            speeds = [
                SimpleNamespace(
                    step_s=choice.step_s,
                    compiled_s=compiled_s * choice.step_s,
                    tokens_per_s_per_device=1.0,
                    mfu=0.1,
                    breakdown={},
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
            stage_layers=lambda layout: (4,),
        )
        monkeypatch.setattr(search.Formulas, "of", lambda run: formulas)
        monkeypatch.setattr(search.Formulas, "of_each", lambda runs: [formulas for _ in runs])
        monkeypatch.setattr(preselection, "scaled", lambda *_, **__: None)
        monkeypatch.setattr(preselection, "StepTime", Speed)
        monkeypatch.setattr(rounds, "_trace", timed)
        monkeypatch.setattr(rounds, "estimate", estimate)
        run = config.load([*MODEL, *overrides, *(f"{k}={v}" for k, v in fixed.items())])
        return search.search_layouts(
            run,
            devices=devices,
            fixed=fixed,
            check=check,
            lowers=lowers,
            kept=kept,
        )

    return find
