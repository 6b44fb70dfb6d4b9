"""Estimates a run's memory from the cache or by tracing, called from the parent without torch.

No device, data file or rank is needed, so a world may have any size. A run that cannot be
estimated is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Generator, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

from axonlaunch import config as configuration
from axonlaunch.config import Composed, ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.config.code.plugins import import_plugins
from axonlaunch.config.consistency.layout import Layout, estimate_device, num_ranks, resolved
from axonlaunch.config.consistency.run_precision import with_precision
from axonlaunch.config.options.hardware import GIB
from axonlaunch.planning import auto_strategy, estimate_cache
from axonlaunch.planning.plan import with_figures
from axonlaunch.planning.records import (
    Estimate,
    Forecast,
    Remedy,
    RoutingForecast,
    Searched,
    StepPrediction,
    TrainingForecast,
)
from axonlaunch.planning.reports.expert_loads import ROUTINGS, routing_forecast, with_routing
from axonlaunch.planning.reports.workload import host_memory, workload
from axonlaunch.planning.throughput.training_time import steps_of_tokens, training_forecast
from axonlaunch.planning.tracing.shape_only_data import (
    replace_with_synthetic,
    with_file_placeholders,
)
from axonlaunch.system.node import allocator_settings, host
from axonlaunch.system.processes import forked_call, forkserver

STATES_ONLY = (
    "analytic: only parameters, gradients, optimizer states and gathered parameters are counted; "
    "activations, messages and temporaries need additional memory"
)
NOT_SEARCHED = "Cannot search for changes that make it fit: "
SEARCH_S = 30.0
"""Time limit in seconds for a search for changes that fit, because the user is waiting."""


def load_for_estimate(
    context: ForkServerContext,
    overrides: Sequence[str],
    *,
    config_name: str,
    config_dirs: Sequence[Path],
) -> RunConfig:
    """Return the configuration of a run, prepared for ``forecast``.

    Args:
        context: Context of the warm fork server.
        overrides: Overrides of the run.
        config_name: Name of the primary config.
        config_dirs: Folders with the user's YAML files.

    Raises:
        ConfigError: The configuration cannot run on any node.
    """

    def compose(overrides: Sequence[str]) -> Composed:
        composed = configuration.compose(
            overrides, config_name=config_name, config_dirs=config_dirs
        )
        return dataclasses.replace(composed, tree=with_file_placeholders(composed.tree))

    _, config = auto_strategy.load_auto_strategy(
        overrides, compose=compose, server=lambda: context, config_dirs=config_dirs
    )
    return resolve_for_node(context, config)


def resolve_for_node(context: ForkServerContext, config: RunConfig) -> RunConfig:
    """Resolve the settings that depend on the node, and the memory of its devices.

    Raises:
        ConfigError: The configuration cannot run on any node.
    """
    if config.launch.nproc == "auto":
        config = forked_call.call(
            context,
            "axonlaunch.preflight.checks:resolve_anywhere",
            replace_with_synthetic(config),
            task="checking the configuration",
        )
    return _with_device_memory(with_precision(resolved(config, accelerators=0)))


def forecast(
    context: ForkServerContext,
    config: RunConfig,
    *,
    exact: bool = False,
    analytic: bool = False,
    tokens: float | None = None,
) -> Forecast:
    """Estimate the memory of a configuration, and the duration and cost of training.

    Args:
        context: Context of the warm fork server.
        config: Result of ``prepared``.
        exact: Whether to trace every layer and micro-batch.
        analytic: Whether to estimate only parameters, gradients and states, without tracing.
        tokens: Number of tokens to train on; None predicts no duration and cost.

    Raises:
        ConfigError: The configuration cannot run on any node, or cannot be traced.
    """
    training = None if tokens is None else _training(context, config, tokens)
    if analytic:
        result = forked_call.call(
            context,
            "axonlaunch.planning.estimate:estimate_without_tracing",
            replace_with_synthetic(config),
            task="estimating memory",
        )
    else:
        result = cached_estimate(context, config, exact=exact)
    routings: list[RoutingForecast] = []
    if config.strategy.expert.degree > 1 and not analytic:
        for routing in ROUTINGS:
            routed = with_routing(config, routing)
            estimated = cached_estimate(context, routed, exact=exact)
            routings.append(routing_forecast(routed, estimated))
    hardware = config.hardware
    return Forecast(
        layout=str(Layout.of(config, world_size=result.world_size)),
        workload=workload(config),
        estimate=result,
        hardware=hardware.name if hardware else None,
        memory_bytes=hardware.memory_bytes if hardware else None,
        margin=config.estimate.margin,
        host_memory=host_memory(config, result),
        states_only=analytic,
        notes=[STATES_ONLY] if analytic else _allocator_notes(config),
        measured=tuple(
            key
            for key in ("context_mib", "communicator_mib")
            if hardware is not None and getattr(hardware, key) is not None
        ),
        routings=tuple(routings),
        training=training,
    )


def _training(context: ForkServerContext, config: RunConfig, tokens: float) -> TrainingForecast:
    """Predict the duration and the cost of training on a number of tokens.

    Raises:
        ConfigError: There is no hardware, it lacks a figure, or the run cannot be traced.
    """
    steps_of_tokens(config, tokens)  # raises an error before the step is traced
    devices = num_ranks(config)
    config, assumed = with_figures(context, config, devices=devices)
    step_s, saved_bytes = forked_call.call(
        context,
        "axonlaunch.planning.estimate:step_and_checkpoint",
        config,
        task="predicting the time of a step",
    )
    predicted = training_forecast(config, tokens=tokens, step_s=step_s, saved_bytes=saved_bytes)
    return dataclasses.replace(predicted, assumed={**assumed, **predicted.assumed})


def step_and_checkpoint(config: RunConfig) -> tuple[float, int]:
    """Return the seconds of a step and the bytes of a checkpoint, in a process forked for it.

    Raises:
        ConfigError: The run cannot be traced, or its hardware lacks a figure.
    """
    from axonlaunch.models.facts.parameter_facts import checkpoint_bytes
    from axonlaunch.planning.throughput.predicted_parts import predict_step

    return predict_step(config).step_s, checkpoint_bytes(config)


def _allocator_notes(config: RunConfig) -> list[str]:
    """Return notes on allocator settings of the user that the estimate ignores."""
    is_gpu = estimate_device(config) == "gpu"
    names = allocator_settings.settings_of_ranks().not_replayed if is_gpu else ()
    if not names:
        return []
    return [
        f"PYTORCH_ALLOC_CONF sets {', '.join(names)}, not replayed: torch may reserve more or "
        "less than is estimated"
    ]


def suggest_changes(
    context: ForkServerContext, config: RunConfig, forecast: Forecast
) -> Generator[Remedy, None, Searched]:
    """Yield changes that make a run fit, the cheapest first, while searching.

    Args:
        context: Context of the warm fork server.
        config: Configuration passed to ``forecast``.
        forecast: Result of ``forecast``.

    Returns:
        Result of the search.
    """
    if forecast.fits is not False:
        return Searched([], 0.0)
    try:
        ended: Searched = yield from forked_call.stream(
            context,
            "axonlaunch.planning.estimate:find_remedies",
            replace_with_synthetic(config),
            forecast.estimate,
            task="looking for changes that fit",
        )
    except ConfigError as error:
        return Searched([], 0.0, error.problems[0].message)
    return ended


def with_routing_changes(
    context: ForkServerContext, config: RunConfig, forecast: Forecast
) -> tuple[RoutingForecast, ...]:
    """Return the forecasts of all loads, with the cheapest change that makes each one fit.

    Args:
        context: Context of the warm fork server.
        config: Configuration passed to ``forecast``.
        forecast: Result of ``forecast``.
    """

    def completed(routed: RoutingForecast) -> RoutingForecast:
        if routed.verdict in (None, "fits"):
            return routed
        case = dataclasses.replace(forecast, estimate=routed.estimate)
        search = suggest_changes(context, with_routing(config, routed.routing), case)
        change = next(search, None)
        search.close()
        return dataclasses.replace(routed, change=change)

    return tuple(map(completed, forecast.routings))


def with_changes(context: ForkServerContext, config: RunConfig, forecast: Forecast) -> Forecast:
    """Return a forecast with every change that makes the run fit, and one for each load of experts.

    Args:
        context: Context of the warm fork server.
        config: Configuration passed to ``forecast``.
        forecast: Result of ``forecast``.
    """
    search = suggest_changes(context, config, forecast)
    changes: list[Remedy] = []
    while True:
        try:
            changes.append(next(search))
        except StopIteration as end:
            ended: Searched = end.value
            break
    notes = [*forecast.notes, *([NOT_SEARCHED + ended.reason] if ended.reason else [])]
    return dataclasses.replace(
        forecast,
        changes=tuple(changes),
        untried=ended.untried,
        notes=notes,
        routings=with_routing_changes(context, config, forecast),
    )


def cached_estimate(
    context: ForkServerContext, config: RunConfig, *, exact: bool = False
) -> Estimate:
    """Return the cached estimate, or compute and cache one.

    Args:
        context: Context of the warm fork server.
        config: Configuration with ``launch.nproc`` resolved.
        exact: Whether to trace every layer.

    Raises:
        ConfigError: The configuration cannot run on any node, or cannot be traced.
    """
    config = replace_with_synthetic(config)
    cached = estimate_cache.read_estimate(config, exact=exact)
    if cached is None:
        cached = forked_call.call(
            context,
            "axonlaunch.planning.estimate:traced_estimate",
            config,
            exact,
            task="estimating memory",
        )
        estimate_cache.write_estimate(config, cached, exact=exact)
    return cached


def trace_in_background(config: RunConfig) -> Estimate:
    """Run ``traced_estimate`` at the lowest priority and without output.

    Its warnings are not needed, because ranks print the same ones.

    Raises:
        ConfigError: The configuration cannot run on any node, or cannot be traced.
    """
    _work_in_background()
    return traced_estimate(config)


def predict_step_in_background(config: RunConfig) -> StepPrediction:
    """Run ``predict_step`` at the lowest priority and without output.

    Raises:
        ConfigError: The run cannot be traced, or its hardware lacks a figure.
    """
    _work_in_background()
    from axonlaunch.planning.throughput.predicted_parts import predict_step

    return predict_step(config)


def _work_in_background() -> None:
    _yield_to_ranks()
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)


def _yield_to_ranks() -> None:
    """Lower the priority of this process and its forks below that of ranks.

    The lowest nice value is not enough: Linux considers the core busy, so a rank that wakes up may
    have to wait. With SCHED_IDLE the core counts as idle, and the rank runs at once.
    """
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def traced_estimate(config: RunConfig, exact: bool = False) -> Estimate:
    """Check and estimate a run. Call this in a process forked for it.

    Raises:
        ConfigError: The configuration cannot run on any node, or cannot be traced.
    """
    forkserver.lead_group()  # tracing forks processes
    from axonlaunch.planning.memory import estimate as memory_estimate
    from axonlaunch.preflight.checks import resolve_anywhere

    import_plugins(config.plugins)
    return memory_estimate.estimate(resolve_anywhere(config), exact=exact)


def find_remedies(config: RunConfig, estimate: Estimate) -> Generator[Remedy, None, Searched]:
    """Search for changes that make a run fit, in a process forked from the server.

    Args:
        config: Configuration with ``launch.nproc`` resolved and known device memory.
        estimate: Estimate of the run.

    Raises:
        ConfigError: The model cannot be traced on one device.
    """
    start = time.monotonic()
    from axonlaunch.models.build import on_meta
    from axonlaunch.models.facts.parameter_facts import stored_bytes
    from axonlaunch.planning.memory import estimate as memory_estimate
    from axonlaunch.planning.memory.analytic import Formulas
    from axonlaunch.planning.search import remedies
    from axonlaunch.preflight.checks import resolve_anywhere

    forkserver.lead_group()
    import_plugins(config.plugins)
    assert config.hardware is not None
    assert config.hardware.memory_bytes is not None
    limit = config.hardware.memory_bytes / (1 + config.estimate.margin)

    def estimate_changed(changed: RunConfig) -> Estimate | None:
        cached = estimate_cache.read_estimate(changed)
        if cached is None:
            cached = memory_estimate.estimate_fitting(
                resolve_anywhere(changed), memory=limit, until=start + SEARCH_S
            )
            if cached is not None:
                estimate_cache.write_estimate(changed, cached)
        return cached

    formulas = Formulas.of(config)

    @functools.cache
    def quantized_bytes(base: str | None) -> int:
        """Return the bytes of all parameters with a base in a format."""
        chosen = config if base is None else with_values(config, {"adapter.base": base})
        model = on_meta(chosen, seed=chosen.seed)
        return stored_bytes(model, element=chosen.train.parameter_bytes)

    def formula(changed: RunConfig) -> float:
        """Return the approximate bytes, from the trace of the run before it was changed."""
        num_bytes = formulas.process_bytes(changed)
        if changed.adapter is None or changed.adapter == config.adapter:
            return num_bytes
        layout = Layout.of(changed, world_size=num_ranks(changed))
        base = None if config.adapter is None else config.adapter.base
        less = quantized_bytes(base) - quantized_bytes(changed.adapter.base)
        return num_bytes - less / layout.parameter_divisor / layout.parameter_shards

    untried = yield from remedies.search_changes(
        config,
        estimate,
        memory=limit,
        formula=formula,
        estimate=estimate_changed,
        is_over=lambda: time.monotonic() >= start + SEARCH_S,
    )
    return Searched(untried, time.monotonic() - start)


def estimate_without_tracing(config: RunConfig) -> Estimate:
    """Check a run and estimate its states, in a process forked from the server.

    Raises:
        ConfigError: The configuration cannot run on any node.
    """
    from axonlaunch.planning.memory import states_only
    from axonlaunch.preflight.checks import resolve_anywhere

    import_plugins(config.plugins)
    return states_only.estimate_states(resolve_anywhere(config))


def _with_device_memory(config: RunConfig) -> RunConfig:
    """Set the device memory of ``hardware=cpu`` to a rank's share of this node's memory.

    Raises:
        ConfigError: The device memory of other hardware is unknown.
    """
    hardware, nproc = config.hardware, config.launch.nproc
    if hardware is None or hardware.memory_gib is not None:
        return config
    if not hardware.is_cpu:
        message = (
            f"is not set for {hardware.name}, so whether a run fits can't be estimated; write the "
            "memory of one device in GiB, or remove hardware"
        )
        raise ConfigError([ConfigIssue("hardware.memory_gib", message, None)])
    assert nproc != "auto"
    share = host.memory_bytes() / nproc / GIB
    return with_values(config, {"hardware.memory_gib": share})
