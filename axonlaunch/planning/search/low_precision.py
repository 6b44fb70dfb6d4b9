"""Changes of numerics that a search tries only if the user allows them.

These are weights in 16 bits with fp32 masters, optimizer states in 8 bits, and products in fp8 on
hardware with an fp8 peak.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.config.axes import AXES
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.consistency.rules import find_rule_violations
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.config.precision import EIGHT_BITS, FP32, MATMUL_FORMATS, Float8Format
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.planning.memory.analytic import Formulas, on_one_device
from axonlaunch.planning.records import Planned
from axonlaunch.planning.search import keys
from axonlaunch.planning.search.candidates import Candidate
from axonlaunch.planning.search.preselection import approximate_step_s
from axonlaunch.preflight.optimizer import layout_problems
from axonlaunch.preflight.parallelism import product_problems

_WORTH = 0.99
"""Largest time of a step, relative to exact layouts, for which a change of numerics is shown."""


_SHAPES_PRODUCTS = (
    *(axis.key for axis in AXES if axis.divides != "blocks"),
    *(keys.EXPERT_RANKS, keys.MICRO_BATCH, keys.RECOMPUTE),
)
"""Settings that decide which matrices a device multiplies."""


@dataclass(frozen=True)
class NumericsChange:
    """Settings of lower precision.

    Attributes:
        name: Description for reports.
        settings: Values by dotted key.
        unsharded_only: Whether it saves nothing where ranks hold shards of the parameters.
    """

    name: str
    settings: Mapping[str, Any]
    unsharded_only: bool = False


def master_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings of weights in the compute format with masters.

    They are empty for fp32, and for optimizers without masters.
    """
    precision = precision_of(config)
    if not precision.compute.is_low or precision.parameters.is_low:
        return {}
    if not hasattr(config.optimizer, "master_weights"):  # a registered optimizer
        return {}
    return {keys.WEIGHTS: precision.compute.name, keys.MASTERS: FP32.name}


def lower_layouts(
    config: RunConfig,
    kept: Collection[str],
    listed: Callable[[RunConfig], Iterable[Candidate]],
    *,
    left_out: Collection[NumericsChange] = (),
) -> tuple[list[Candidate], list[ConfigIssue]]:
    """Return the layouts of each combination of changes, and why a run can't use some changes.

    Args:
        config: Configuration of the run.
        kept: Keys that the user has set. Changes of them are left out.
        listed: Function that lists the layouts of a run.
        left_out: Changes that no layout gets.
    """
    possible, problems = _possible_changes(config, kept)
    kinds = [[change for change in kind if change not in left_out] for kind in possible]
    layouts: list[Candidate] = []
    for changes in _combinations(kinds):
        settings = _settings(changes)
        for candidate in listed(with_values(config, settings)):
            if any(change.unsharded_only for change in changes) and (
                candidate.layout.facts.shards_parameters
            ):
                continue
            layouts.append(
                dataclasses.replace(
                    candidate,
                    settings={**candidate.settings, **settings},
                    numerics=tuple(change.name for change in changes),
                )
            )
    return layouts, problems


def product_changes(config: RunConfig, kept: Collection[str]) -> list[NumericsChange]:
    """Return the changes of products that a run can use.

    Args:
        config: Configuration of the run.
        kept: Keys that the user has set. Changes of them are left out.
    """
    kinds, _ = _possible_changes(config, kept)
    return [change for kind in kinds for change in kind if keys.PRODUCTS in change.settings]


def slow_changes(
    changes: Sequence[NumericsChange],
    layouts: Iterable[Candidate],
    formulas: Mapping[tuple[str, ...], Formulas],
    hardware: HardwareConfig,
) -> list[NumericsChange]:
    """Return the changes of products with which no layout is faster than with all others.

    The times are by formulas, of one layout for each shape of products.

    Args:
        changes: Changes of products.
        layouts: Layouts without changes.
        formulas: Formulas of the model without changes, and with each of them alone.
        hardware: Description of the devices.
    """
    shapes = {tuple(layout.settings[key] for key in _SHAPES_PRODUCTS): layout for layout in layouts}
    fastest: list[str] = []
    for layout in shapes.values():
        seconds = {"": approximate_step_s(layout, formulas[()], hardware=hardware)}
        for change in changes:
            changed = with_values(layout.config, change.settings)
            seconds[change.name] = approximate_step_s(
                dataclasses.replace(layout, config=changed),
                formulas[(change.name,)],
                hardware=hardware,
            )
        fastest.append(min(seconds, key=seconds.__getitem__))
    return [change for change in changes if change.name not in fastest]


def slowness(
    config: RunConfig, changes: Sequence[NumericsChange], slow: Sequence[NumericsChange]
) -> list[ConfigIssue]:
    """Return that slow changes of products are not searched, of all ``changes`` of them."""
    message = "is not the fastest choice for any layout"
    if len(slow) == len(changes) and not config.train.compile:
        message += ", because roundings are fused only with train.compile=true"
    return [ConfigIssue(keys.PRODUCTS, message, each.settings[keys.PRODUCTS]) for each in slow]


def smallest_run(config: RunConfig, kept: Collection[str]) -> RunConfig | None:
    """Return a run with the changes that save memory, or None if it can't use any.

    Args:
        config: Configuration of the run.
        kept: Keys that the user has set. Changes of them are left out.
    """
    kinds, _ = _possible_changes(config, kept)
    changes = [change for kind in kinds for change in kind if keys.PRODUCTS not in change.settings]
    return with_values(config, _settings(changes)) if changes else None


def faster_ones(lower: Iterable[Planned], exact: Iterable[Planned]) -> list[Planned]:
    """Return the layouts of lower precision that fit, and are faster than all exact ones that fit.

    A layout that changes numerics and is not faster would be useless.
    """
    limit = worthwhile_time(exact)
    return [planned for planned in lower if planned.fits and planned.ranked_s < limit]


def worthwhile_time(exact: Iterable[Planned]) -> float:
    """Return the ranked seconds from which lower precision is useless; infinite if none fits."""
    return _WORTH * min((planned.ranked_s for planned in exact if planned.fits), default=math.inf)


def _possible_changes(
    config: RunConfig, kept: Collection[str]
) -> tuple[list[list[NumericsChange]], list[ConfigIssue]]:
    """Return the changes that a run can use, by kind, and the problems of the others."""
    kinds: list[list[NumericsChange]] = []
    problems: list[ConfigIssue] = []
    for kind in _changes(config):
        possible = []
        impossible: dict[str, ConfigIssue] = {}
        for change in kind:
            if not change.settings.keys().isdisjoint(kept):
                continue
            if issues := _problems(config, change):
                impossible.setdefault(issues[0].message, issues[0])
            else:
                possible.append(change)
        kinds.append(possible)
        problems += impossible.values()
    return kinds, problems


def _combinations(
    kinds: Iterable[Sequence[NumericsChange]],
) -> Iterator[tuple[NumericsChange, ...]]:
    """Yield all choices of at most one change of each kind, except that of no change."""
    for choice in itertools.product(*([None, *kind] for kind in kinds)):
        if changes := tuple(change for change in choice if change is not None):
            yield changes


def _settings(changes: Iterable[NumericsChange]) -> dict[str, Any]:
    return {key: value for change in changes for key, value in change.settings.items()}


def _changes(config: RunConfig) -> Iterator[list[NumericsChange]]:
    """Yield the alternatives of each kind of change that differ from the configuration."""
    precision = precision_of(config)
    if config.adapter is not None:  # its own weights are in fp32, and the others have no masters
        if precision.compute.is_low and not precision.parameters.is_low:
            compute = precision.compute.name
            yield [NumericsChange(f"{compute} frozen weights", {keys.WEIGHTS: compute})]
    elif masters := master_settings(config):
        name = f"{masters[keys.WEIGHTS]} weights with fp32 masters"
        # A shard of a weight and of its gradient in 16 bits saves as much as a master takes.
        yield [NumericsChange(name, masters, unsharded_only=True)]
    if getattr(config.optimizer, "state_dtype", EIGHT_BITS) != EIGHT_BITS:
        yield [NumericsChange("8-bit optimizer states", {keys.STATES: EIGHT_BITS})]
    if config.train.matmul_dtype is None:
        in_fp8 = [name for name, how in MATMUL_FORMATS.items() if isinstance(how, Float8Format)]
        yield [NumericsChange(f"{name} products", {keys.PRODUCTS: name}) for name in in_fp8]


def _problems(config: RunConfig, change: NumericsChange) -> list[ConfigIssue]:
    """Return why a run can't use a change on any layout."""
    changed = with_values(on_one_device(config), change.settings)
    spec = spec_for(changed)
    undivided = _without_degrees(config)
    try:
        # Settings that need degrees break rules with and without the change.
        broken = find_rule_violations(undivided)
        violations = find_rule_violations(with_values(undivided, change.settings))
        return [
            *(issue for issue in violations if issue not in broken),
            *_unpriced_products(changed),
            *layout_problems(changed, Layout.of(changed, world_size=1)),
            *product_problems(changed, spec, on_meta(changed, seed=changed.seed)),
        ]
    except ConfigError as error:
        return error.problems


def _without_degrees(config: RunConfig) -> RunConfig:
    """Return a run on one device with all other strategy settings of the user."""
    degrees = dict.fromkeys((*(axis.key for axis in AXES), keys.EXPERT_RANKS), 1)
    settings = {**degrees, keys.KIND: "none", keys.REPLICATE: "auto"}
    return with_values(with_values(on_one_device(config), {"strategy": config.strategy}), settings)


def _unpriced_products(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a problem if products can't be timed. CPUs compute them, but have no peak of them."""
    hardware, products = config.hardware, precision_of(config).products
    if hardware is None or products is None or products.peak is None:
        return
    if hardware.is_cpu and getattr(hardware, products.peak) is None:
        message = f"hardware={hardware.name} has no {products.peak}, so a step can't be timed"
        yield ConfigIssue(keys.PRODUCTS, message, products.name)
