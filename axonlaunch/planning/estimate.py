"""Estimates a run's memory from the parent, which has no torch: out of the cache, or by tracing.

No device, data file or rank takes part, so a world may be of any size; what can't be estimated is
refused.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Generator, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

from axonlaunch import config as configuration
from axonlaunch.config import Composed, ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.config.hardware import GIB
from axonlaunch.config.layout import Layout, estimated_on, resolved
from axonlaunch.config.plugins import import_plugins
from axonlaunch.planning import auto_strategy, estimate_cache
from axonlaunch.planning.records import Estimate, Forecast, Remedy, Searched, StepPrediction
from axonlaunch.planning.search.workload import host_memory, workload
from axonlaunch.planning.tracing.shape_only_data import naming_files, replace_with_synthetic
from axonlaunch.system import allocator_settings, forked_call, forkserver, host

STATES_ALONE = (
    "analytic: parameters, their gradients and optimizer states, and what is gathered of them; "
    "activations, messages and temporaries come on top and are not estimated"
)
SEARCH_S = 30.0
"""Seconds that a search for changes that fit takes at most: a person waits."""


def load_for_estimate(
    context: ForkServerContext,
    overrides: Sequence[str],
    *,
    config_name: str,
    config_dirs: Sequence[Path],
) -> RunConfig:
    """Return the run that overrides ask for, as ``forecast`` takes it.

    Args:
        context: Of the warm fork server.
        overrides: Of the run.
        config_name: The primary config.
        config_dirs: Folders of a user's own YAML.

    Raises:
        ConfigError: The configuration can't be run on any node.
    """

    def compose(overrides: Sequence[str]) -> Composed:
        composed = configuration.compose(
            overrides, config_name=config_name, config_dirs=config_dirs
        )
        return dataclasses.replace(composed, tree=naming_files(composed.tree))

    _, config = auto_strategy.load_auto_strategy(
        overrides, compose=compose, server=lambda: context, config_dirs=config_dirs
    )
    return prepared(context, config)


def prepared(context: ForkServerContext, config: RunConfig) -> RunConfig:
    """Decide what a configuration leaves to the node, and its hardware's memory.

    Raises:
        ConfigError: The configuration can't be run on any node.
    """
    if config.launch.nproc == "auto":
        config = forked_call.call(
            context, "axonlaunch.preflight.checks:resolve_anywhere", replace_with_synthetic(config)
        )
    return _on_named_hardware(resolved(config, accelerators=0))


def forecast(
    context: ForkServerContext, config: RunConfig, *, exact: bool = False, analytic: bool = False
) -> Forecast:
    """Estimate the memory of a configuration.

    Args:
        context: Of the warm fork server.
        config: As ``prepared`` returns it.
        exact: Trace every layer and micro-batch.
        analytic: Trace nothing, and estimate states alone.

    Raises:
        ConfigError: It can't be run on any node, or can't be traced.
    """
    if analytic:
        result = forked_call.call(
            context, "axonlaunch.planning.estimate:without_tracing", replace_with_synthetic(config)
        )
    else:
        result = cached_estimate(context, config, exact=exact)
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
        notes=[STATES_ALONE] if analytic else _of_allocator(config),
        measured=tuple(
            key
            for key in ("context_mib", "communicator_mib")
            if hardware is not None and getattr(hardware, key) is not None
        ),
    )


def _of_allocator(config: RunConfig) -> list[str]:
    """Say which of the user's settings the reserved bytes of a GPU do not follow."""
    is_gpu = estimated_on(config) == "gpu"
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
    """Yield changes after which a run fits, the cheapest first, as they are found.

    Args:
        context: Of the warm fork server.
        config: As ``forecast`` took it.
        forecast: What that returned.

    Returns:
        How the search ended.
    """
    if forecast.fits is not False:
        return Searched(0, 0.0)
    try:
        ended: Searched = yield from forked_call.stream(
            context,
            "axonlaunch.planning.estimate:find_remedies",
            replace_with_synthetic(config),
            forecast.estimate,
        )
    except ConfigError as error:
        return Searched(0, 0.0, error.problems[0].message)
    return ended


def cached_estimate(
    context: ForkServerContext, config: RunConfig, *, exact: bool = False
) -> Estimate:
    """Return the cached estimate, or make and cache one.

    Args:
        context: Of the warm fork server.
        config: With ``launch.nproc`` resolved.
        exact: Trace every layer.

    Raises:
        ConfigError: It can't be run on any node, or can't be traced.
    """
    config = replace_with_synthetic(config)
    cached = estimate_cache.read_estimate(config, exact=exact)
    if cached is None:
        cached = forked_call.call(
            context, "axonlaunch.planning.estimate:traced_estimate", config, exact
        )
        estimate_cache.write_estimate(config, cached, exact=exact)
    return cached


def trace_beside(config: RunConfig) -> Estimate:
    """Do as ``trace`` at the lowest priority and silently: ranks print the same warnings.

    Raises:
        ConfigError: The configuration can't be run on any node, or can't be traced.
    """
    _work_beside()
    return traced_estimate(config)


def predict_step_beside(config: RunConfig) -> StepPrediction:
    """Do as ``predict_step`` at the lowest priority and silently.

    Raises:
        ConfigError: The run can't be traced, or its hardware lacks a figure.
    """
    _work_beside()
    from axonlaunch.planning.throughput.predicted_parts import predict_step

    return predict_step(config)


def _work_beside() -> None:
    _yield_to_ranks()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _yield_to_ranks() -> None:
    """Lower the priority of this process, and of those it forks, below that of ranks.

    At the lowest priority alone a core that traces still looks busy to Linux, so that a rank which
    wakes up may be put behind it; under SCHED_IDLE it looks free, and the rank runs at once.
    """
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def traced_estimate(config: RunConfig, exact: bool = False) -> Estimate:
    """Check and estimate, in a process of its own.

    Raises:
        ConfigError: The configuration can't be run on any node, or can't be traced.
    """
    forkserver.lead_group()  # it forks a process for each stage
    from axonlaunch.planning.memory import estimate as memory_estimate
    from axonlaunch.preflight.checks import resolve_anywhere

    import_plugins(config.plugins)
    return memory_estimate.estimate(resolve_anywhere(config), exact=exact)


def find_remedies(config: RunConfig, estimate: Estimate) -> Generator[Remedy, None, Searched]:
    """Look for what makes a run fit, in a process forked from the server.

    Args:
        config: With ``launch.nproc`` resolved, and hardware whose memory is known.
        estimate: Its estimate.

    Raises:
        ConfigError: The model can't be traced on one device.
    """
    began = time.monotonic()
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
                resolve_anywhere(changed), memory=limit, until=began + SEARCH_S
            )
            if cached is not None:
                estimate_cache.write_estimate(changed, cached)
        return cached

    untried = yield from remedies.search_changes(
        config,
        estimate,
        memory=limit,
        formula=Formulas.of(config).process_bytes,
        estimate=estimate_changed,
        is_over=lambda: time.monotonic() >= began + SEARCH_S,
    )
    return Searched(untried, time.monotonic() - began)


def without_tracing(config: RunConfig) -> Estimate:
    """Check, and count the bytes of states, in a process forked from the server.

    Raises:
        ConfigError: The configuration can't be run on any node.
    """
    from axonlaunch.planning.memory import states_only
    from axonlaunch.preflight.checks import resolve_anywhere

    import_plugins(config.plugins)
    return states_only.estimate_states(resolve_anywhere(config))


def _on_named_hardware(config: RunConfig) -> RunConfig:
    """Give a rank on ``hardware=cpu`` its share of this node's memory.

    Raises:
        ConfigError: The memory of other hardware is not known.
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
