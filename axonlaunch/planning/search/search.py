"""Searches the layouts of a number of devices for the fastest ones that fit.

1. Formulas rank all layouts, using work and memory traced on one device.
2. The work of the best layouts is traced.
3. The memory of the fastest of these is estimated, until enough of them fit.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from axonlaunch.config import ConfigError, RunConfig, flatten, with_values
from axonlaunch.config.consistency.layout import num_ranks
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.config.options.hardware import GIB, HardwareConfig
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.config.problems.errors import plain
from axonlaunch.models.facts.parameter_facts import checkpoint_bytes
from axonlaunch.models.fake import fake_tensor_cache
from axonlaunch.models.source_of import source_of
from axonlaunch.planning.memory.analytic import Formulas
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.records import (
    Estimate,
    FitVerdict,
    Plan,
    Planned,
    describe_recomputation,
    verdict,
)
from axonlaunch.planning.search import refusals
from axonlaunch.planning.search.candidates import Candidate, candidates
from axonlaunch.planning.search.low_precision import (
    faster_ones,
    lower_layouts,
    smallest_run,
    worthwhile_time,
)
from axonlaunch.planning.search.workload import host_memory, workload
from axonlaunch.planning.throughput.analytic_work import scaled
from axonlaunch.planning.throughput.roofline import figure, refuse_missing
from axonlaunch.planning.throughput.step_time import StepTime
from axonlaunch.planning.throughput.step_work import step_works
from axonlaunch.planning.throughput.throughput import Throughput, speed_of
from axonlaunch.system.processes import forked_map

TIMED = 20
"""Number of layouts whose work is traced."""
TRIED = 10
"""Maximum number of layouts to estimate in a round, because the user is waiting."""
LISTED = 5
"""Maximum number of layouts in a plan."""
ROUNDS = 3
"""Maximum number of rounds; the last one estimates the smallest layout."""
_CHANCES = 2
"""Layouts of a family, which differ in recomputation and offload, that may be traced."""
_MAX_INVALID = 200
"""Number of layouts that may be invalid before the search gives up."""


def search_layouts(
    config: RunConfig,
    *,
    devices: int,
    fixed: Mapping[str, Any],
    check: Callable[[RunConfig], RunConfig],
    wanted: int = 3,
    lowers: bool = False,
    kept: Sequence[str] = (),
) -> Plan:
    """Find the fastest layouts that fit.

    Args:
        config: Configuration of the run; its layout is ignored, except for ``fixed``.
        devices: Number of devices.
        fixed: Settings from ``keys.SEARCHED`` that the user has set.
        check: Resolves a run, or raises ``ConfigError`` if no node can run it.
        wanted: Number of fitting layouts to find.
        lowers: Whether layouts with lower precision, see ``low_precision``, are searched as well.
        kept: Keys of precision that the user has set.

    Raises:
        ConfigError: No layout divides the devices, no layout fits, the run cannot be traced, or
            the hardware lacks a figure.
    """
    if config.estimate.routing == "balanced":  # no router of a real run is
        config = with_values(config, {"estimate.routing": "skewed"})
    hardware = config.hardware
    assert hardware is not None
    refuse_missing(hardware, _required_figures(config, devices))
    memory = figure(hardware, "memory_gib") * GIB / (1 + config.estimate.margin)
    per_node = figure(hardware, "devices_per_node")

    def list_layouts(
        run: RunConfig, count: int, settings: Mapping[str, Any]
    ) -> Iterable[Candidate]:
        return candidates(
            run,
            devices=count,
            in_node=count // _num_nodes(count, per_node),
            fixed=settings,
            offloads=hardware.host_gb_s is not None,
        )

    layouts = [*list_layouts(config, devices, fixed)]
    if not layouts:
        issue = refusals.none_divides(
            config,
            devices=devices,
            fixed=fixed,
            listed=lambda run, settings: list_layouts(run, devices, settings),
        )
        raise ConfigError([issue])
    lower, problems = (
        lower_layouts(config, kept, lambda run: list_layouts(run, devices, fixed))
        if lowers
        else ([], [])
    )
    formulas = _formulas(config, lower)
    num_nodes = _num_nodes(devices, per_node)
    estimate_layouts = partial(
        _estimate_in_rounds,
        config=config,
        ranks=(num_nodes, devices // num_nodes),
        formulas=formulas,
        memory=memory,
        check=check,
        wanted=wanted,
    )
    found = estimate_layouts(layouts)
    if lower:
        try:
            found = _merged(found, estimate_layouts(lower, useless=worthwhile_time(found.plans)))
        except ConfigError as error:
            problems += error.problems
    searched = len(layouts) + len(lower)
    if not any(planned.fits for planned in found.plans):

        def expects_fit(run: RunConfig, count: int, settings: Mapping[str, Any]) -> bool:
            sizes = formulas[()] if run is config else Formulas.of(run)
            return any(
                sizes.process_bytes(c.config, c.layout) <= found.limit
                for c in list_layouts(run, count, settings)
            )

        issue = refusals.none_fits(
            config,
            found.plans,
            devices=devices,
            searched=searched,
            fixed=fixed,
            fits=expects_fit,
            lowered=None if lowers else smallest_run(config, kept),
            not_tried=problems,
        )
        raise ConfigError([issue])
    return Plan(
        workload=workload(config, searched=True),
        searched=searched,
        candidates=found.plans[:LISTED],
        untraced=found.untraced,
        not_tried=tuple(map(str, problems)),
    )


def _num_nodes(devices: int, per_node: float) -> int:
    """Return the smallest number of nodes that hold equally many of the devices."""
    return next(n for n in range(1, devices + 1) if devices % n == 0 and devices // n <= per_node)


def _formulas(config: RunConfig, lower: Iterable[Candidate]) -> dict[tuple[str, ...], Formulas]:
    """Return the formulas of the configured numerics and of each change of them."""
    runs = {(): config} | {candidate.numerics: candidate.config for candidate in lower}
    return dict(zip(runs, Formulas.of_each([*runs.values()]), strict=True))


def _required_figures(config: RunConfig, devices: int) -> list[str]:
    """Return the names of the hardware figures that are needed to time layouts."""
    assert config.hardware is not None
    train = config.train
    peak = config.hardware.peak_figure(
        precision=train.precision, matmul_precision=train.matmul_precision
    )
    names = ["memory_gib", "devices_per_node", PRECISIONS[train.precision].peak]
    names += [peak] if peak not in names else []
    if (products := precision_of(config).products) is not None and products.peak is not None:
        names.append(products.peak)
    names += ["matrix_efficiency", "multiprocessors"]
    if source_of(config).scaled_sizes().num_attention_heads:
        names.append("attention_efficiency")
    if not config.hardware.kernel_bytes:
        names += ["memory_bandwidth_gb_s", "memory_efficiency"]
    links = ["link"] if devices > 1 else []
    in_node = config.hardware.devices_per_node
    if in_node is not None and devices > in_node:
        links.append("network")
    suffixes = ("gb_s", "efficiency", "latency_us")
    return names + [f"{link}_{name}" for link in links for name in suffixes]


@dataclass(frozen=True, eq=False)
class _Preselected:
    """A layout with its step time and memory from formulas."""

    candidate: Candidate
    step_s: float
    bytes: float


@dataclass(frozen=True)
class _Found:
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


def _estimate_in_rounds(
    layouts: Sequence[Candidate],
    *,
    config: RunConfig,
    ranks: tuple[int, int],
    formulas: Mapping[tuple[str, ...], Formulas],
    memory: float,
    check: Callable[[RunConfig], RunConfig],
    wanted: int,
    useless: float = math.inf,
) -> _Found:
    """Estimate the fastest layouts in rounds, until some of them fit.

    If no layout of a round fits, the formulas were too low. The memory limit for the formulas is
    then lowered by the same factor. The last round estimates only the smallest layout.

    Args:
        layouts: All layouts.
        config: Configuration of the run as given by the user.
        ranks: Number of nodes, and ranks per node.
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
        preselected = _preselect(
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
        estimates = _estimate_first(worthwhile, config=config, ranks=ranks, wanted=wanted)
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
    return _Found(sorted(plans, key=lambda planned: not planned.fits), limit, untraced)


def _merged(exact: _Found, lower: _Found) -> _Found:
    """Return the exact layouts with the faster ones of lower precision; all if none fits."""
    if not any(planned.fits for planned in [*exact.plans, *lower.plans]):
        return _Found(exact.plans + lower.plans, exact.limit, exact.untraced)
    chosen = faster_ones(lower.plans, exact.plans)
    plans = sorted([*chosen, *exact.plans], key=lambda planned: (not planned.fits, planned.step_s))
    return _Found(plans, exact.limit, lower.untraced if chosen else exact.untraced)


def _faster_untraced(
    preselected: Sequence[_Preselected],
    timed: Sequence[tuple[_Preselected, Throughput]],
    estimates: Mapping[_Preselected, Planned],
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


def _preselect(
    layouts: Iterable[Candidate],
    *,
    formulas: Mapping[tuple[str, ...], Formulas],
    hardware: HardwareConfig,
    memory: float,
) -> list[_Preselected]:
    """Return two layouts of each family that fit by the formulas, fastest family first.

    They are the fastest one, and the fastest one of those with less memory, in case that the
    formulas are too low. If nothing fits, return the smallest layout.
    """
    families: dict[tuple[Any, ...], list[_Preselected]] = {}
    counts: Counter[tuple[Any, ...]] = Counter()
    smallest: _Preselected | None = None
    for candidate in layouts:
        layout, model = candidate.layout, formulas[candidate.numerics]
        size = model.process_bytes(candidate.config, layout)
        if size > memory:
            if smallest is None or size < smallest.bytes:
                smallest = _Preselected(candidate, math.inf, size)
            continue
        group = (candidate.family, candidate.offload)
        counts[group] += 1
        if counts[group] > _CHANCES:
            continue  # earlier ones of the group recompute less
        depth = sum(model.single_device.layers)
        work = scaled(
            model.single_device,
            candidate.config,
            layout,
            layers=_layers(depth, layout.num_stages, model.head_layers),
            experts=model.experts(candidate.config, layout),
        )
        seconds = StepTime(candidate.config, layout, hardware).approximate(work)
        families.setdefault(candidate.family, []).append(_Preselected(candidate, seconds, size))
    if not families:
        assert smallest is not None
        return [smallest]
    chosen = map(_fastest_and_smaller, families.values())
    return [choice for pair in sorted(chosen, key=lambda pair: pair[0].step_s) for choice in pair]


def _fastest_and_smaller(family: Sequence[_Preselected]) -> list[_Preselected]:
    """Return the fastest layout of a family, and the fastest one with less memory, if any."""
    fastest = min(family, key=lambda choice: choice.step_s)
    smaller = [choice for choice in family if choice.bytes < fastest.bytes]
    return [fastest, *sorted(smaller, key=lambda choice: choice.step_s)[: _CHANCES - 1]]


def _layers(depth: int, stages: int, head: float) -> tuple[int, ...]:
    """Return the number of layers of each stage as training has them: stages take equally long.

    Args:
        depth: Number of layers of the model.
        stages: Number of stages.
        head: Work of the head in the last stage, in layers.
    """
    if stages == 1 or depth < stages:
        return _evenly(depth, stages)
    mean = math.floor((depth + head) / stages - head)
    splits = [
        (*_evenly(depth - last, stages - 1), last) for last in {max(1, mean), max(1, mean + 1)}
    ]
    costs = {counts: [*counts[:-1], counts[-1] + head] for counts in splits}
    return min(splits, key=lambda counts: (max(costs[counts]), sum(c * c for c in costs[counts])))


def _evenly(depth: int, stages: int) -> tuple[int, ...]:
    """Give the blocks that remain to the last stages, which hold fewer micro-batches at once."""
    even, rest = divmod(depth, stages)
    return (even,) * (stages - rest) + (even + 1,) * rest


def _valid(
    preselected: list[_Preselected], check: Callable[[RunConfig], RunConfig]
) -> list[_Preselected]:
    """Return the first layouts that pass the checks of a run.

    Raises:
        ConfigError: No layout passes; this is the error of the first layout.
    """
    valid: list[_Preselected] = []
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
    first: list[_Preselected], *, hardware: HardwareConfig
) -> list[tuple[_Preselected, Throughput]]:
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
    first: list[tuple[_Preselected, Throughput]],
    *,
    config: RunConfig,
    ranks: tuple[int, int],
    wanted: int,
) -> dict[_Preselected, Planned]:
    """Estimate layouts in the order of their speed, until ``wanted`` of them fit.

    Args:
        first: Layouts with their speed, fastest first.
        config: Configuration of the run as given by the user.
        ranks: Number of nodes, and ranks per node.
        wanted: Number of fitting layouts to find.
    """
    plans: dict[_Preselected, Planned] = {}
    remaining = first[:TRIED]
    while remaining and (missing := wanted - sum(planned.fits for planned in plans.values())):
        tried, remaining = remaining[:missing], remaining[missing:]
        estimates = forked_map.map_forked(
            [partial(estimate, choice.candidate.config, ends=True) for choice, _ in tried],
            task="estimating the memory of a layout",
            memory=fake_tensor_cache.recipes,
        )
        for (choice, speed), result in zip(tried, estimates, strict=True):
            plans[choice] = _plan_of(choice.candidate, speed, result, config=config, ranks=ranks)
    return plans


def _plan_of(
    candidate: Candidate,
    speed: Throughput,
    result: Estimate,
    *,
    config: RunConfig,
    ranks: tuple[int, int],
) -> Planned:
    return Planned(
        overrides=_overrides(config, candidate, ranks),
        layout=_describe(candidate),
        mesh=candidate.layout.axes,
        peak_bytes=result.peak_bytes,
        host_bytes=result.host_bytes,
        process_bytes=result.process_bytes,
        verdict=_verdict(result, config),
        tokens_per_s_per_device=speed.tokens_per_s_per_device,
        step_s=speed.step_s,
        mfu=speed.mfu,
        breakdown=speed.breakdown,
        host_memory=host_memory(candidate.config, result),
        saved_bytes=checkpoint_bytes(candidate.config),
        numerics=[*candidate.numerics],
    )


def _verdict(estimate: Estimate, config: RunConfig) -> FitVerdict:
    assert config.hardware is not None
    memory = figure(config.hardware, "memory_gib") * GIB
    return verdict(estimate.process_bytes, memory=memory, margin=config.estimate.margin)


def _describe(candidate: Candidate) -> str:
    """Describe a layout, including settings that its axes do not show."""
    config, layout = candidate.config, candidate.layout
    properties = [str(layout)]
    if layout.facts.shards_parameters and config.strategy.fsdp.sharding == "shard_grad_op":
        properties.append("shard_grad_op")
    if candidate.offload != "none":
        properties.append(f"{candidate.offload.replace('_', ' ')} offloaded")
    properties.append(f"micro-batch {layout.micro_batch_size}")
    if config.train.activation_checkpointing != "none":
        properties.append(describe_recomputation(config.train.activation_checkpointing))
    properties += candidate.numerics
    return ", ".join(properties)


def _overrides(config: RunConfig, candidate: Candidate, ranks: tuple[int, int]) -> list[str]:
    """Return the overrides that turn the configuration of the user into this layout."""
    values = flatten(config)
    overrides = [
        f"{key}={plain(value)}" for key, value in candidate.settings.items() if value != values[key]
    ]
    num_nodes, ranks_per_node = ranks
    if num_nodes != values["launch.nnodes"]:
        overrides.append(f"launch.nnodes={num_nodes}")
    return [*overrides, f"launch.nproc={ranks_per_node}"]
