"""Ranks layouts by formulas, from the work and the memory of the model on one device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.planning.memory.analytic import Formulas
from axonlaunch.planning.search.candidates import Candidate
from axonlaunch.planning.throughput.analytic_work import scaled
from axonlaunch.planning.throughput.step_time import StepTime

_CHANCES = 2
"""Layouts of a family, which differ in recomputation and offload, that may be traced."""


@dataclass(frozen=True, eq=False)
class Preselected:
    """A layout with its step time and memory from formulas."""

    candidate: Candidate
    step_s: float
    bytes: float

    @property
    def ranked_s(self) -> float:
        """Seconds by which layouts are ranked, see ``Candidate.rank_factor``."""
        return self.step_s * self.candidate.rank_factor


def preselect(
    layouts: Iterable[Candidate],
    *,
    formulas: Mapping[tuple[str, ...], Formulas],
    hardware: HardwareConfig,
    memory: float,
) -> list[Preselected]:
    """Return two layouts of each family that fit by the formulas, fastest family first.

    They are the fastest one, and the fastest one of those with less memory, in case that the
    formulas are too low. If nothing fits, return the smallest layout.
    """
    families: dict[tuple[Any, ...], list[Preselected]] = {}
    counts: Counter[tuple[Any, ...]] = Counter()
    smallest: Preselected | None = None
    for listed in layouts:
        group = (listed.family, listed.offload)
        if counts[group] == _CHANCES:
            continue  # earlier ones of the group recompute less
        model = formulas[listed.numerics]
        candidate, size = with_memory(listed, model, memory=memory)
        if size > memory:
            if smallest is None or size - candidate.logits_bytes < smallest.bytes:
                candidate, size = _smaller(candidate, model, size=size)
                if smallest is None or size < smallest.bytes:
                    smallest = Preselected(candidate, math.inf, size)
            continue
        counts[group] += 1
        seconds = approximate_step_s(candidate, model, hardware=hardware)
        families.setdefault(candidate.family, []).append(Preselected(candidate, seconds, size))
    if not families:
        assert smallest is not None
        return [smallest]
    chosen = map(_fastest_and_smaller, families.values())
    return [choice for pair in sorted(chosen, key=lambda pair: pair[0].ranked_s) for choice in pair]


def approximate_step_s(
    candidate: Candidate, formulas: Formulas, *, hardware: HardwareConfig
) -> float:
    """Return the seconds of a step by formulas."""
    config, layout = candidate.config, candidate.layout
    work = scaled(
        formulas.single_device,
        config,
        layout,
        layers=formulas.stage_layers(layout),
        experts=formulas.experts(config, layout),
    )
    return StepTime(config, layout, hardware).approximate(work)


def with_memory(
    candidate: Candidate, formulas: Formulas, *, memory: float
) -> tuple[Candidate, float]:
    """Return a layout and its bytes by formulas, with its loss in chunks if it fits only then."""
    size = formulas.process_bytes(candidate.config, candidate.layout)
    if memory < size <= memory + candidate.logits_bytes:
        chunked, smaller = _smaller(candidate, formulas, size=size)
        if smaller <= memory:
            return chunked, smaller
    return candidate, size


def _smaller(candidate: Candidate, formulas: Formulas, *, size: float) -> tuple[Candidate, float]:
    """Return a layout and its bytes by formulas, with its loss in chunks if that is less."""
    if candidate.logits_bytes:
        chunked = candidate.with_chunks()
        smaller = formulas.process_bytes(chunked.config, chunked.layout)
        if smaller < size:
            return chunked, smaller
    return candidate, size


def _fastest_and_smaller(family: Sequence[Preselected]) -> list[Preselected]:
    """Return the fastest layout of a family, and the fastest one with less memory, if any."""
    fastest = min(family, key=lambda choice: choice.ranked_s)
    smaller = [choice for choice in family if choice.bytes < fastest.bytes]
    return [fastest, *sorted(smaller, key=lambda choice: choice.ranked_s)[: _CHANCES - 1]]
