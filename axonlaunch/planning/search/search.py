"""Searches the layouts of a number of devices for the fastest ones that fit.

1. Formulas rank all layouts, using work and memory traced on one device.
2. The work of the best layouts is traced.
3. The memory of the fastest of these is estimated, until enough of them fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from axonlaunch.config import ConfigError, RunConfig, with_values
from axonlaunch.config.consistency.run_nodes import RunNodes, describes_nodes
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.config.options.hardware import GIB
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.models.source_of import source_of
from axonlaunch.planning.memory.analytic import Formulas
from axonlaunch.planning.records import Plan
from axonlaunch.planning.reports.workload import workload
from axonlaunch.planning.search import keys, refusals
from axonlaunch.planning.search.candidates import Candidate, candidates
from axonlaunch.planning.search.compiled import compiled_layout
from axonlaunch.planning.search.low_precision import (
    lower_layouts,
    product_changes,
    slow_changes,
    slowness,
    smallest_run,
    worthwhile_time,
)
from axonlaunch.planning.search.preselection import with_memory
from axonlaunch.planning.search.rounds import Found, estimate_in_rounds, merge_found, similar_ratio
from axonlaunch.planning.throughput.roofline import figure, refuse_missing

LISTED = 5
"""Maximum number of layouts in a plan."""


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
    nodes = RunNodes.of_devices(config, devices)
    refuse_missing(hardware, _required_figures(config, devices, nodes))
    memory = figure(hardware, "memory_gib") * GIB / (1 + config.estimate.margin)

    def list_layouts(
        run: RunConfig, count: int, settings: Mapping[str, Any]
    ) -> Iterable[Candidate]:
        return candidates(
            run,
            devices=count,
            in_node=RunNodes.of_devices(run, count).ranks,
            fixed=settings,
            offloads=hardware.host_gb_s is not None,
        )

    layouts = _without_refused_chunks([*list_layouts(config, devices, fixed)], check)
    if not layouts:
        issue = refusals.none_divides(
            config,
            devices=devices,
            fixed=fixed,
            listed=lambda run, settings: list_layouts(run, devices, settings),
        )
        raise ConfigError([issue])
    changes = product_changes(config, kept) if lowers else []
    formulas = _formulas(
        {(): config} | {(each.name,): with_values(config, each.settings) for each in changes}
    )
    slow = slow_changes(changes, layouts, formulas, hardware)
    lower, problems = (
        lower_layouts(config, kept, lambda run: list_layouts(run, devices, fixed), left_out=slow)
        if lowers
        else ([], [])
    )
    problems += slowness(config, changes, slow)
    lower = _without_refused_chunks(lower, check)
    formulas |= _formulas(
        {each.numerics: each.config for each in lower if each.numerics not in formulas}
    )
    estimate_layouts = partial(
        estimate_in_rounds,
        config=config,
        nodes=nodes,
        formulas=formulas,
        memory=memory,
        check=check,
        wanted=wanted,
    )
    found = estimate_layouts(layouts)
    if lower:
        try:
            faster = estimate_layouts(
                lower,
                ranked_limit=worthwhile_time(found.plans),
                least_ratio=similar_ratio(found),
            )
            found = merge_found(found, faster)
        except ConfigError as error:
            problems += error.problems
    searched = len(layouts) + len(lower)
    if not any(planned.fits for planned in found.plans):

        def expects_fit(run: RunConfig, count: int, settings: Mapping[str, Any]) -> bool:
            sizes = formulas[()] if run is config else Formulas.of(run)
            listed = _without_refused_chunks([*list_layouts(run, count, settings)], check)
            return any(with_memory(c, sizes, memory=found.limit)[1] <= found.limit for c in listed)

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
        not_tried=(*map(str, problems), *([] if lowers else _lower_note(config, kept, found))),
        nodes=nodes,
        imbalance=config.estimate.imbalance if _splits_experts(layouts) else None,
        compiled=compiled_layout(found.estimated[0], check=check),
    )


def _splits_experts(layouts: Iterable[Candidate]) -> bool:
    return any(candidate.layout.expert > 1 for candidate in layouts)


def _lower_note(config: RunConfig, kept: Sequence[str], found: Found) -> Iterator[str]:
    """Yield that lower precision may need no offload, if the first layout offloads."""
    if found.plans[0].rank_factor > 1 and smallest_run(config, kept) is not None:
        option = f"--allow {keys.LOW_PRECISION} (changes numerics)"
        yield f"lower precision, with which offload may not be needed; use {option}"


def _without_refused_chunks(
    layouts: list[Candidate], check: Callable[[RunConfig], RunConfig]
) -> list[Candidate]:
    """Return layouts without chunks of the loss if the model needs all its logits at once."""
    large = max(layouts, key=lambda candidate: candidate.logits_bytes, default=None)
    if large is None or not large.logits_bytes:
        return layouts
    try:
        check(large.with_chunks().config)
    except ConfigError as error:
        if any(problem.key == keys.LOSS_CHUNK for problem in error.problems):
            return [dataclasses.replace(candidate, logits_bytes=0.0) for candidate in layouts]
    return layouts


def _formulas(runs: Mapping[tuple[str, ...], RunConfig]) -> dict[tuple[str, ...], Formulas]:
    """Return the formulas of runs with each change of numerics."""
    return dict(zip(runs, Formulas.of_each([*runs.values()]), strict=True))


def _required_figures(config: RunConfig, devices: int, nodes: RunNodes) -> list[str]:
    """Return the names of the hardware figures that are needed to time layouts."""
    assert config.hardware is not None
    train = config.train
    peak = config.hardware.peak_figure(
        precision=train.precision, matmul_precision=train.matmul_precision
    )
    names = ["memory_gib"]
    names += [] if describes_nodes(config, devices) else ["devices_per_node"]
    names.append(PRECISIONS[train.precision].peak)
    names += [peak] if peak not in names else []
    if (products := precision_of(config).products) is not None and products.peak is not None:
        names.append(products.peak)
    names += ["matrix_efficiency", "multiprocessors"]
    if source_of(config).scaled_sizes().num_attention_heads:
        names.append("attention_efficiency")
    if not config.hardware.kernel_bytes:
        names += ["memory_bandwidth_gb_s", "memory_efficiency"]
    links = ["link"] if devices > 1 else []
    if nodes.count > 1:
        links.append("network")
    suffixes = ("gb_s", "efficiency", "latency_us")
    return names + [f"{link}_{name}" for link in links for name in suffixes]
