"""Estimates the fastest layouts in rounds, until enough of them fit."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.consistency.layout import num_ranks
from axonlaunch.config.consistency.run_nodes import RunNodes
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.models.fake import fake_tensor_cache
from axonlaunch.planning.memory.analytic import Formulas
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.records import Planned
from axonlaunch.planning.search import keys
from axonlaunch.planning.search.candidates import Candidate
from axonlaunch.planning.search.low_precision import faster_ones
from axonlaunch.planning.search.planned_layouts import planned_layout
from axonlaunch.planning.search.preselection import Preselected, preselect
from axonlaunch.planning.throughput.step_work import step_works
from axonlaunch.planning.throughput.throughput import Throughput, speed_of
from axonlaunch.system.processes import forked_map

TIMED = 20
"""Maximum number of layouts of a round whose work is traced."""
TRIED = 10
"""Maximum number of layouts to estimate in a round, because the user is waiting."""
ROUNDS = 3
"""Maximum number of rounds; the last one estimates the smallest layout."""
_LEAST_RATIO = 0.8
"""Lowest assumed time of a traced step relative to formulas; it decides what is traced next."""
_RATIO_SLACK = 0.02
"""Amount by which this ratio may be lower with other numerics than in all layouts traced so far."""
_MAX_INVALID = 200
"""Number of layouts that may be invalid before the search gives up."""


@dataclass(frozen=True)
class EstimatedLayout:
    """A layout with its predictions.

    Attributes:
        planned: Record of the layout.
        config: Configuration of the run with this layout.
        speed: Predicted speed.
    """

    planned: Planned
    config: RunConfig
    speed: Throughput

    @property
    def fits(self) -> bool:
        """Whether the device and the host have enough memory, with the margin."""
        return self.planned.fits


@dataclass(frozen=True)
class Found:
    """Result of the rounds.

    Attributes:
        estimated: Estimated layouts, fitting ones first.
        limit: Memory limit for the formulas, after correction by the estimates.
        untraced: Number of layouts that were not traced, fit by formulas and may be faster than the
            first one.
        least_ratio: Lowest time of a traced step relative to formulas.
    """

    estimated: list[EstimatedLayout]
    limit: float
    untraced: int
    least_ratio: float = _LEAST_RATIO

    @property
    def plans(self) -> list[Planned]:
        """Records of the layouts."""
        return [layout.planned for layout in self.estimated]


def estimate_in_rounds(
    layouts: Sequence[Candidate],
    *,
    config: RunConfig,
    nodes: RunNodes,
    formulas: Mapping[tuple[str, ...], Formulas],
    memory: float,
    check: Callable[[RunConfig], RunConfig],
    wanted: int,
    ranked_limit: float = math.inf,
    least_ratio: float = _LEAST_RATIO,
) -> Found:
    """Estimate the fastest layouts in rounds, until some of them fit.

    If no layout of a round fits, the formulas were too low. The memory limit for the formulas is
    then lowered by the same factor. The last round estimates only the smallest layout.

    Args:
        layouts: All layouts.
        config: Configuration of the run as given by the user.
        nodes: Nodes of the run.
        formulas: Formulas of the model by ``Candidate.numerics``.
        memory: Bytes of device memory that an estimate may use.
        check: Resolves a run, or raises ``ConfigError``.
        wanted: Number of fitting layouts to find.
        ranked_limit: Value of ``ranked_s`` from which layouts are not estimated.
        least_ratio: Lowest assumed time of a traced step relative to formulas.

    Raises:
        ConfigError: No layout of the first round can be run or traced.
    """
    assert config.hardware is not None
    estimated: list[EstimatedLayout] = []
    limit, untraced, ratios = memory, 0, [math.inf]
    for rounds_left in reversed(range(ROUNDS)):
        preselected = preselect(
            layouts,
            formulas=formulas,
            hardware=config.hardware,
            memory=limit if rounds_left else 0.0,
        )
        try:
            order = TracedOrder(
                _valid(preselected, check),
                hardware=config.hardware,
                ranked_limit=ranked_limit,
                least_ratio=least_ratio,
            )
            estimates = _estimate_first(iter(order), config=config, nodes=nodes, wanted=wanted)
        except ConfigError:
            if estimated:
                break
            raise
        estimated = [*estimates.values(), *estimated]
        untraced = _faster_untraced(preselected, order, estimates)
        ratios += [speed.step_s / choice.step_s for choice, speed in order.traced]
        layouts = [*_remaining(layouts, [choice.candidate.settings for choice in estimates])]
        if (
            any(layout.fits for layout in estimated)
            or math.isinf(preselected[0].step_s)
            or not layouts
            or not estimates
        ):
            break
        underestimate = max(
            layout.planned.process_bytes / choice.bytes for choice, layout in estimates.items()
        )
        limit = min(limit, memory / underestimate)
    fitting_first = sorted(estimated, key=lambda layout: not layout.fits)
    return Found(fitting_first, limit, untraced, min(ratios))


def merge_found(exact: Found, lower: Found) -> Found:
    """Return the exact layouts with the faster ones of lower precision; all if none fits."""
    if not any(planned.fits for planned in [*exact.plans, *lower.plans]):
        return dataclasses.replace(exact, estimated=exact.estimated + lower.estimated)
    faster = faster_ones(lower.plans, exact.plans)
    chosen = [layout for layout in lower.estimated if layout.planned in faster]
    both = [*chosen, *exact.estimated]
    estimated = sorted(both, key=lambda layout: (not layout.fits, layout.planned.ranked_s))
    untraced = lower.untraced if chosen else exact.untraced
    return dataclasses.replace(exact, estimated=estimated, untraced=untraced)


def similar_ratio(found: Found) -> float:
    """Return the lowest assumed ``least_ratio`` of layouts that differ from these in numerics."""
    return max(_LEAST_RATIO, found.least_ratio - _RATIO_SLACK)


def _remaining(
    layouts: Iterable[Candidate], estimated: Collection[Mapping[str, Any]]
) -> Iterator[Candidate]:
    """Yield layouts that were not estimated, and those with a loss in chunks if they may be less.

    Args:
        layouts: Layouts with all logits at once.
        estimated: Settings of the estimated layouts.
    """
    for candidate in layouts:
        if candidate.settings not in estimated:
            if {**candidate.settings, keys.LOSS_CHUNK: keys.CHUNK} not in estimated:
                yield candidate
        elif candidate.logits_bytes:
            yield candidate.with_chunks()


def _faster_untraced(
    preselected: Sequence[Preselected],
    order: TracedOrder,
    estimates: Mapping[Preselected, EstimatedLayout],
) -> int:
    """Return how many untraced layouts may be ranked before all that fit.

    Their times by formulas are corrected by the median ratio of the traced layouts.
    """
    fitting = [layout.planned.ranked_s for layout in estimates.values() if layout.fits]
    if not fitting:
        return 0
    checked = [choice.candidate.settings for choice in order.valid]
    is_checked = [choice.candidate.settings in checked for choice in preselected]
    unchecked = preselected[len(is_checked) - is_checked[::-1].index(True) :]
    ratio = statistics.median(speed.step_s / choice.step_s for choice, speed in order.traced)
    untraced = [*order.waiting, *unchecked]
    return sum(choice.ranked_s * ratio < min(fitting) for choice in untraced)


def _valid(
    preselected: list[Preselected], check: Callable[[RunConfig], RunConfig]
) -> list[Preselected]:
    """Return the first layouts that pass the checks of a run.

    Raises:
        ConfigError: No layout passes; this is the error of the first layout.
    """
    valid: list[Preselected] = []
    errors: list[ConfigError] = []
    for choice in preselected:
        try:
            checked = check(choice.candidate.config)
        except ConfigError as error:
            errors.append(error)
        else:
            candidate = dataclasses.replace(choice.candidate, config=checked)
            valid.append(dataclasses.replace(choice, candidate=candidate))
        if len(valid) == TIMED or len(errors) == _MAX_INVALID:
            break
    if not valid:
        raise errors[0]
    return valid


def _ranked_s(choice: Preselected, speed: Throughput) -> float:
    """Return the seconds by which a traced layout is ranked, see ``Candidate.rank_factor``."""
    return speed.step_s * choice.candidate.rank_factor


class TracedOrder:
    """Layouts in their rank by the time of the traced step.

    A layout is traced only if it may be the next one: if its time by formulas, times
    ``least_ratio``, is below that of all traced ones. Layouts that cannot be traced, or whose rank
    is not below ``ranked_limit``, are left out. It can be iterated once.

    Attributes:
        valid: All layouts.
        waiting: Layouts that are not traced yet, fastest first by formulas.
        traced: Traced layouts with their speed.
    """

    def __init__(
        self,
        valid: Sequence[Preselected],
        *,
        hardware: HardwareConfig,
        ranked_limit: float = math.inf,
        least_ratio: float = _LEAST_RATIO,
    ) -> None:
        """Begin without traces.

        Args:
            valid: Layouts that pass the checks of a run.
            hardware: Description of the devices.
            ranked_limit: Value of ``ranked_s`` from which layouts are left out.
            least_ratio: Lowest assumed time of a traced step relative to formulas.
        """
        self.valid = valid
        self.waiting = sorted(valid, key=lambda choice: choice.ranked_s)
        self.traced: list[tuple[Preselected, Throughput]] = []
        self._hardware = hardware
        self._ranked_limit = ranked_limit
        self._least_ratio = least_ratio
        self._earlier: list[tuple[Any, Any]] = []

    def __iter__(self) -> Iterator[tuple[Preselected, Throughput]]:
        """Yield each layout with its speed; traces are made on the way.

        Raises:
            ConfigError: No layout can be traced; this is the error of the first layout.
        """
        errors: list[ConfigError] = []
        ready: list[tuple[Preselected, Throughput]] = []
        while ready or self.waiting:
            best = min(ready, key=lambda pair: _ranked_s(*pair), default=None)
            best_s = math.inf if best is None else _ranked_s(*best)
            next_s = self.waiting[0].ranked_s * self._least_ratio if self.waiting else math.inf
            if min(best_s, next_s) >= self._ranked_limit < math.inf:
                break
            if best is not None and next_s >= best_s:
                ready.remove(best)
                yield best
                continue
            count = forked_map.share_of_cores()
            next_ones, self.waiting = self.waiting[:count], self.waiting[count:]
            for choice, result in _trace(next_ones, hardware=self._hardware, earlier=self._earlier):
                if isinstance(result, ConfigError):
                    errors.append(result)
                else:
                    ready.append((choice, result))
                    self.traced.append((choice, result))
        if not self.traced and errors:
            raise errors[0]


def _trace(
    choices: list[Preselected], *, hardware: HardwareConfig, earlier: list[tuple[Any, Any]]
) -> list[tuple[Preselected, Throughput | ConfigError]]:
    """Trace the work of layouts and return their speed, or the error.

    Args:
        choices: Layouts to trace.
        hardware: Description of the devices.
        earlier: Earlier traces, to which new ones are added.
    """
    configs = [choice.candidate.config for choice in choices]
    works = step_works(configs, world_size=num_ranks(configs[0]), earlier=earlier)
    results = [
        work if isinstance(work, ConfigError) else speed_of(config, hardware, work)
        for config, work in zip(configs, works, strict=True)
    ]
    return list(zip(choices, results, strict=True))


def _estimate_first(
    order: Iterator[tuple[Preselected, Throughput]],
    *,
    config: RunConfig,
    nodes: RunNodes,
    wanted: int,
) -> dict[Preselected, EstimatedLayout]:
    """Estimate layouts in the order of their speed, until ``wanted`` of them fit.

    A layout that offloads more than a faster one that fits has no use, and is left out.

    Args:
        order: Layouts with their speed, fastest first.
        config: Configuration of the run as given by the user.
        nodes: Nodes of the run.
        wanted: Number of fitting layouts to find.
    """
    estimates: dict[Preselected, EstimatedLayout] = {}
    remaining = islice(
        (pair for pair in order if not _offloads_in_vain(*pair, estimates.values())), TRIED
    )
    while missing := wanted - sum(layout.fits for layout in estimates.values()):
        if not (tried := [*islice(remaining, missing)]):
            break
        results = forked_map.map_forked(
            [partial(estimate, choice.candidate.config, ends=True) for choice, _ in tried],
            task="estimating the memory of a layout",
            memory=fake_tensor_cache.recipes,
        )
        for (choice, speed), result in zip(tried, results, strict=True):
            candidate = choice.candidate
            if _offloads_in_vain(choice, speed, estimates.values()):
                continue
            planned = planned_layout(candidate, speed, result, config=config, nodes=nodes)
            estimates[choice] = EstimatedLayout(planned, candidate.config, speed)
    return estimates


def _offloads_in_vain(
    choice: Preselected, speed: Throughput, estimated: Iterable[EstimatedLayout]
) -> bool:
    """Return whether a layout offloads more than one that fits and is as fast or faster."""
    return any(
        layout.fits
        and layout.planned.rank_factor < choice.candidate.rank_factor
        and layout.planned.step_s <= speed.step_s
        for layout in estimated
    )
