"""Searches the layouts of a number of devices for the fastest that fits.

Closed formulas, on work and memory traced on one device, order all of them; the first are traced
as they are, and those that turn out fastest have their memory estimated until enough fit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from axonlaunch.config import ConfigError, RunConfig, flatten
from axonlaunch.config.errors import plain
from axonlaunch.config.hardware import GIB, HardwareConfig
from axonlaunch.config.layout import num_ranks
from axonlaunch.models import fake_tensor_cache
from axonlaunch.models.figures import model_figures
from axonlaunch.planning.memory.analytic import Formulas
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.records import Estimate, FitVerdict, Plan, Planned, verdict
from axonlaunch.planning.search import refusals
from axonlaunch.planning.search.candidates import Candidate, candidates
from axonlaunch.planning.search.workload import host_memory, workload
from axonlaunch.planning.throughput.analytic_work import scaled
from axonlaunch.planning.throughput.roofline import figure, refuse_missing
from axonlaunch.planning.throughput.step_time import StepTime
from axonlaunch.planning.throughput.step_work import step_work
from axonlaunch.planning.throughput.throughput import Throughput, speed_of
from axonlaunch.system import forked_map

TIMED = 6
"""Layouts whose work is traced."""
TRIED = 4
"""Layouts whose memory is estimated in a round, at most: a person waits."""
ROUNDS = 3
"""Rounds in which nothing may fit; in the last the smallest layout is estimated."""
_REFUSED = 200
"""Layouts that a run's own checks may refuse before the search gives up."""


def search_layouts(
    config: RunConfig,
    *,
    devices: int,
    fixed: Mapping[str, Any],
    check: Callable[[RunConfig], RunConfig],
    wanted: int = 3,
) -> Plan:
    """Find the fastest layouts that fit.

    Args:
        config: A run; its layout is what is looked for.
        devices: Ranks.
        fixed: Settings of ``keys.SEARCHED`` that stay as they are.
        check: Resolves a run, or raises ``ConfigError`` where no node can do it.
        wanted: Layouts that fit.

    Raises:
        ConfigError: No layout divides the devices, or none fits; the run can't be traced, or the
            hardware lacks a figure.
    """
    hardware = config.hardware
    assert hardware is not None
    refuse_missing(hardware, _missing_figures(config, devices))
    memory = figure(hardware, "memory_gib") * GIB / (1 + config.estimate.margin)
    per_node = figure(hardware, "devices_per_node")

    def list_layouts(
        run: RunConfig, count: int, settings: Mapping[str, Any]
    ) -> Iterable[Candidate]:
        return candidates(
            run,
            devices=count,
            in_node=min(count, per_node),
            fixed=settings,
            offloads=hardware.host_gb_s is not None,
        )

    choices = [*list_layouts(config, devices, fixed)]
    if not choices:
        issue = refusals.none_divides(
            config,
            devices=devices,
            fixed=fixed,
            listed=lambda run, settings: list_layouts(run, devices, settings),
        )
        raise ConfigError([issue])
    formulas = Formulas.of(config)
    in_node = min(devices, per_node)
    num_nodes = devices // in_node if devices % in_node == 0 else 1
    tried, limit = _estimate_in_rounds(
        choices,
        config=config,
        ranks=(num_nodes, devices // num_nodes),
        formulas=formulas,
        memory=memory,
        check=check,
        wanted=wanted,
    )
    if not any(planned.fits for planned in tried):
        issue = refusals.none_fits(
            config,
            tried,
            devices=devices,
            searched=len(choices),
            fixed=fixed,
            fits=lambda count, settings: any(
                formulas.process_bytes(c.config, c.layout) <= limit
                for c in list_layouts(config, count, settings)
            ),
        )
        raise ConfigError([issue])
    known = workload(config, searched=True)
    return Plan(workload=known, searched=len(choices), candidates=tried[:TRIED])


def _missing_figures(config: RunConfig, devices: int) -> list[str]:
    """Return the figures of hardware without which no layout can be timed."""
    assert config.hardware is not None
    train = config.train
    peak = config.hardware.peak_figure(
        precision=train.precision, matmul_precision=train.matmul_precision
    )
    names = ["memory_gib", "devices_per_node", f"{train.precision}_tflops"]
    names += [peak] if peak not in names else []
    names += ["matrix_efficiency", "multiprocessors"]
    if model_figures(config.model).num_attention_heads:
        names.append("attention_efficiency")
    if not config.hardware.kernel_bytes:
        names += ["memory_bandwidth_gb_s", "memory_efficiency"]
    crossed = ["link"] if devices > 1 else []
    in_node = config.hardware.devices_per_node
    if in_node is not None and devices > in_node:
        crossed.append("network")
    figures = ("gb_s", "efficiency", "latency_us")
    return names + [f"{link}_{part}" for link in crossed for part in figures]


@dataclass(frozen=True, eq=False)
class _Likely:
    """A layout by analytic formulas."""

    candidate: Candidate
    step_s: float
    bytes: float


def _estimate_in_rounds(
    listed: Sequence[Candidate],
    *,
    config: RunConfig,
    ranks: tuple[int, int],
    formulas: Formulas,
    memory: float,
    check: Callable[[RunConfig], RunConfig],
    wanted: int,
) -> tuple[list[Planned], float]:
    """Estimate the fastest layouts until some fit, in rounds; return them, those that fit first.

    Where none of a round fits, the formulas found too little for it: in the next they may find as
    much less. The last round is of the layout that they find the smallest.

    Args:
        listed: All layouts.
        config: The run as it was given.
        ranks: Nodes, and ranks of each.
        formulas: Of the run.
        memory: Bytes that an estimate may take.
        check: Resolves a run, or raises ``ConfigError``.
        wanted: Layouts that fit.

    Returns:
        The layouts, and the bytes that formulas may find of one that is to fit.

    Raises:
        ConfigError: None of the first round can be run, or traced.
    """
    assert config.hardware is not None
    plans: list[Planned] = []
    limit = memory
    for left in reversed(range(ROUNDS)):
        likely = _likely(
            listed, formulas=formulas, hardware=config.hardware, memory=limit if left else 0.0
        )
        try:
            first = _fastest(_legal(likely, check), hardware=config.hardware)
        except ConfigError:
            if plans:
                break
            raise
        estimates = _estimate_first(first, config=config, ranks=ranks, wanted=wanted)
        plans = [*estimates.values(), *plans]
        done = [choice.candidate.settings for choice in estimates]
        listed = [candidate for candidate in listed if candidate.settings not in done]
        if any(planned.fits for planned in plans) or math.isinf(likely[0].step_s) or not listed:
            break
        off = max(planned.process_bytes / choice.bytes for choice, planned in estimates.items())
        limit = min(limit, memory / off)
    return sorted(plans, key=lambda planned: not planned.fits), limit


def _likely(
    listed: Iterable[Candidate],
    *,
    formulas: Formulas,
    hardware: HardwareConfig,
    memory: float,
) -> list[_Likely]:
    """Return layouts that seem to fit, the fastest first; of each family the one."""
    best: dict[tuple[Any, ...], _Likely] = {}
    done: set[tuple[Any, ...]] = set()
    smallest: _Likely | None = None
    for candidate in listed:
        layout = candidate.layout
        size = formulas.process_bytes(candidate.config, layout)
        if size > memory:
            if smallest is None or size < smallest.bytes:
                smallest = _Likely(candidate, math.inf, size)
            continue
        if (kept_there := (candidate.family, candidate.offload)) in done:
            continue  # what recomputes less comes first
        done.add(kept_there)
        layers = _layers(sum(formulas.one.layers), layout.num_stages)
        work = scaled(formulas.one, candidate.config, layout, layers=layers)
        seconds = StepTime(candidate.config, layout, hardware).about(work)
        known = best.get(candidate.family)
        if known is None or seconds < known.step_s:
            best[candidate.family] = _Likely(candidate, seconds, size)
    if not best:
        assert smallest is not None
        return [smallest]
    return sorted(best.values(), key=lambda time: time.step_s)


def _layers(depth: int, stages: int) -> tuple[int, ...]:
    return tuple(depth // stages + (stage < depth % stages) for stage in range(stages))


def _legal(likely: list[_Likely], check: Callable[[RunConfig], RunConfig]) -> list[_Likely]:
    """Return the first layouts that a run's own checks pass.

    Raises:
        ConfigError: What is wrong with the first, if no layout passes.
    """
    legal: list[_Likely] = []
    refused: list[ConfigError] = []
    for choice in likely:
        try:
            checked = check(choice.candidate.config)
        except ConfigError as error:
            refused.append(error)
        else:
            candidate = dataclasses.replace(choice.candidate, config=checked)
            legal.append(dataclasses.replace(choice, candidate=candidate))
        if len(legal) == TIMED or len(refused) == _REFUSED:
            break
    if not legal:
        raise refused[0]
    return legal


def _fastest(first: list[_Likely], *, hardware: HardwareConfig) -> list[tuple[_Likely, Throughput]]:
    """Trace the work of layouts; return those that can be with their speed, the fastest first.

    Raises:
        ConfigError: Why the first can't be traced, if none can.
    """
    runs = [partial(_time_layout, choice.candidate.config, hardware) for choice in first]
    works = forked_map.map_forked(
        runs, task="tracing a step to predict its time", memory=fake_tensor_cache.recipes
    )
    fastest = [
        (choice, work)
        for choice, work in zip(first, works, strict=True)
        if isinstance(work, Throughput)
    ]
    if not fastest:
        assert isinstance(works[0], ConfigError)
        raise works[0]
    return sorted(fastest, key=lambda pair: pair[1].step_s)


def _time_layout(config: RunConfig, hardware: HardwareConfig) -> Throughput | ConfigError:
    """Return a layout's speed, or why it can't be traced (too small a micro-batch, say)."""
    try:
        return speed_of(config, hardware, step_work(config, world_size=num_ranks(config)))
    except ConfigError as error:
        return error


def _estimate_first(
    first: list[tuple[_Likely, Throughput]],
    *,
    config: RunConfig,
    ranks: tuple[int, int],
    wanted: int,
) -> dict[_Likely, Planned]:
    """Estimate layouts in the order of their speed until as many fit as are wanted.

    Args:
        first: Layouts, the fastest first.
        config: The run as it was given.
        ranks: Nodes, and ranks of each.
        wanted: Layouts that fit.
    """
    plans: dict[_Likely, Planned] = {}
    for choice, speed in first[:TRIED]:
        candidate = choice.candidate
        result = estimate(candidate.config, ends=True)
        plans[choice] = Planned(
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
        )
        if sum(planned.fits for planned in plans.values()) == wanted:
            break
    return plans


def _verdict(estimate: Estimate, config: RunConfig) -> FitVerdict:
    assert config.hardware is not None
    memory = figure(config.hardware, "memory_gib") * GIB
    return verdict(estimate.process_bytes, memory=memory, margin=config.estimate.margin)


def _describe(candidate: Candidate) -> str:
    """Describe a layout, including settings that its axes don't show."""
    config, layout = candidate.config, candidate.layout
    properties = [str(layout)]
    if layout.facts.shards_parameters and config.strategy.fsdp.sharding == "shard_grad_op":
        properties.append("shard_grad_op")
    if candidate.offload != "none":
        properties.append(f"{candidate.offload.replace('_', ' ')} offloaded")
    properties.append(f"micro-batch {layout.micro_batch_size}")
    if config.train.activation_checkpointing != "none":
        properties.append(f"{config.train.activation_checkpointing} recomputation")
    return ", ".join(properties)


def _overrides(config: RunConfig, candidate: Candidate, ranks: tuple[int, int]) -> list[str]:
    """Write what differs from the run as it was given, and what is the layout's own choice."""
    values = flatten(config)
    overrides = [
        f"{key}={plain(value)}" for key, value in candidate.settings.items() if value != values[key]
    ]
    num_nodes, of_each = ranks
    if num_nodes > 1:
        overrides.append(f"launch.nnodes={num_nodes}")
    return [*overrides, f"launch.nproc={of_each}"]
