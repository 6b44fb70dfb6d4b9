"""Estimates the fastest layouts in rounds, until enough of them fit."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.consistency.layout import num_ranks
from axonlaunch.config.consistency.run_nodes import RunNodes
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.models.fake import fake_tensor_cache
from axonlaunch.planning.memory.analytic import Formulas
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.records import Planned
from axonlaunch.planning.search.candidates import Candidate
from axonlaunch.planning.search.low_precision import faster_ones
from axonlaunch.planning.search.planned_layouts import planned_layout
from axonlaunch.planning.search.preselection import Preselected, preselect
from axonlaunch.planning.throughput.step_work import step_works
from axonlaunch.planning.throughput.throughput import Throughput, speed_of
from axonlaunch.system.processes import forked_map

TIMED = 20
"""Number of layouts whose work is traced."""
TRIED = 10
"""Maximum number of layouts to estimate in a round, because the user is waiting."""
ROUNDS = 3
"""Maximum number of rounds; the last one estimates the smallest layout."""
_MAX_INVALID = 200
"""Number of layouts that may be invalid before the search gives up."""


@dataclass(frozen=True)
class Found:
    """Result of the rounds.

    Attributes:
        plans: Estimated layouts, fitting ones first.
        limit: Memory limit for the formulas, after correction by the estimates.
        untraced: Number of layouts that were not traced, fit by formulas and may be faster than the
            first one.
    """

    plans: list[Planned]
    limit: float
    untraced: int


def estimate_in_rounds(
    layouts: Sequence[Candidate],
    *,
    config: RunConfig,
    nodes: RunNodes,
    formulas: Mapping[tuple[str, ...], Formulas],
    memory: float,
    check: Callable[[RunConfig], RunConfig],
    wanted: int,
    useless: float = math.inf,
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
        useless: Seconds of a step from which layouts are not estimated.

    Raises:
        ConfigError: No layout of the first round can be run or traced.
    """
    assert config.hardware is not None
    plans: list[Planned] = []
    limit, untraced = memory, 0
    for rounds_left in reversed(range(ROUNDS)):
        preselected = preselect(
            layouts,
            formulas=formulas,
            hardware=config.hardware,
            memory=limit if rounds_left else 0.0,
        )
        try:
            timed = _fastest(_valid(preselected, check), hardware=config.hardware)
        except ConfigError:
            if plans:
                break
            raise
        worthwhile = timed
        if math.isfinite(useless):
            worthwhile = [pair for pair in timed if pair[1].step_s < useless]
        estimates = _estimate_first(worthwhile, config=config, nodes=nodes, wanted=wanted)
        plans = [*estimates.values(), *plans]
        untraced = _faster_untraced(preselected, timed, estimates)
        estimated = [choice.candidate.settings for choice in estimates]
        layouts = [candidate for candidate in layouts if candidate.settings not in estimated]
        if (
            any(planned.fits for planned in plans)
            or math.isinf(preselected[0].step_s)
            or not layouts
            or not estimates
        ):
            break
        underestimate = max(
            planned.process_bytes / choice.bytes for choice, planned in estimates.items()
        )
        limit = min(limit, memory / underestimate)
    return Found(sorted(plans, key=lambda planned: not planned.fits), limit, untraced)


def merge_found(exact: Found, lower: Found) -> Found:
    """Return the exact layouts with the faster ones of lower precision; all if none fits."""
    if not any(planned.fits for planned in [*exact.plans, *lower.plans]):
        return Found(exact.plans + lower.plans, exact.limit, exact.untraced)
    chosen = faster_ones(lower.plans, exact.plans)
    plans = sorted([*chosen, *exact.plans], key=lambda planned: (not planned.fits, planned.step_s))
    return Found(plans, exact.limit, lower.untraced if chosen else exact.untraced)


def _faster_untraced(
    preselected: Sequence[Preselected],
    timed: Sequence[tuple[Preselected, Throughput]],
    estimates: Mapping[Preselected, Planned],
) -> int:
    """Return how many untraced layouts may be faster than the fastest one that fits.

    Their times by formulas are corrected by the median ratio of the traced layouts.
    """
    fitting = [planned.step_s for planned in estimates.values() if planned.fits]
    if not fitting:
        return 0
    traced = [choice.candidate.settings for choice, _ in timed]
    is_traced = [choice.candidate.settings in traced for choice in preselected]
    remaining = preselected[len(is_traced) - is_traced[::-1].index(True) :]
    ratio = statistics.median(speed.step_s / choice.step_s for choice, speed in timed)
    return sum(choice.step_s * ratio < min(fitting) for choice in remaining)


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


def _fastest(
    first: list[Preselected], *, hardware: HardwareConfig
) -> list[tuple[Preselected, Throughput]]:
    """Trace the work of layouts and return them with their speed, fastest first.

    Layouts that cannot be traced are left out.

    Raises:
        ConfigError: No layout can be traced; this is the error of the first layout.
    """
    configs = [choice.candidate.config for choice in first]
    works = step_works(configs, world_size=num_ranks(configs[0]))
    results = [
        work if isinstance(work, ConfigError) else speed_of(config, hardware, work)
        for config, work in zip(configs, works, strict=True)
    ]
    fastest = [
        (choice, result)
        for choice, result in zip(first, results, strict=True)
        if isinstance(result, Throughput)
    ]
    if not fastest:
        assert isinstance(results[0], ConfigError)
        raise results[0]
    return sorted(fastest, key=lambda pair: pair[1].step_s)


def _estimate_first(
    first: list[tuple[Preselected, Throughput]],
    *,
    config: RunConfig,
    nodes: RunNodes,
    wanted: int,
) -> dict[Preselected, Planned]:
    """Estimate layouts in the order of their speed, until ``wanted`` of them fit.

    Args:
        first: Layouts with their speed, fastest first.
        config: Configuration of the run as given by the user.
        nodes: Nodes of the run.
        wanted: Number of fitting layouts to find.
    """
    plans: dict[Preselected, Planned] = {}
    remaining = first[:TRIED]
    while remaining and (missing := wanted - sum(planned.fits for planned in plans.values())):
        tried, remaining = remaining[:missing], remaining[missing:]
        estimates = forked_map.map_forked(
            [partial(estimate, choice.candidate.config, ends=True) for choice, _ in tried],
            task="estimating the memory of a layout",
            memory=fake_tensor_cache.recipes,
        )
        for (choice, speed), result in zip(tried, estimates, strict=True):
            plans[choice] = planned_layout(
                choice.candidate, speed, result, config=config, nodes=nodes
            )
    return plans
