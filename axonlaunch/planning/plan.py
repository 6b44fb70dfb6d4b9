"""Searches for the fastest layouts that fit, called from the parent process without torch.

No device, data file or rank is needed. A model that cannot be traced is an error, and so is
hardware without the required figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from axonlaunch import config as configuration
from axonlaunch.config import Composed, Composer, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.code.plugins import import_plugins
from axonlaunch.config.consistency.layout import estimate_device, nodes
from axonlaunch.config.consistency.rules import find_rule_violations
from axonlaunch.config.consistency.run_nodes import RunNodes, describes_nodes, uneven_devices
from axonlaunch.config.consistency.run_precision import with_precision
from axonlaunch.config.problems.errors import one_of
from axonlaunch.diagnostics.doctor import measured_hardware
from axonlaunch.planning.records import Plan, Planned
from axonlaunch.planning.search.assumed_figures import with_assumed_figures
from axonlaunch.planning.search.found_hardware import asks_for_hardware, with_found_hardware
from axonlaunch.planning.search.keys import ALLOWABLE, LOSS_CHUNK, LOW_PRECISION, SEARCHED
from axonlaunch.planning.throughput.training_time import steps_of_tokens, training_forecast
from axonlaunch.planning.tracing.shape_only_data import (
    replace_with_synthetic,
    with_file_placeholders,
)
from axonlaunch.system.processes import forked_call, forkserver


def plan_run(
    context: ForkServerContext,
    overrides: Sequence[str],
    *,
    devices: int,
    config_name: str,
    config_dirs: Sequence[Path],
    tokens: float | None = None,
    allow: Sequence[str] = (),
) -> Plan:
    """Check a configuration and search its layouts.

    Args:
        context: Context of the warm fork server.
        overrides: Overrides of the run. Layout settings among them are kept.
        devices: Number of devices.
        config_name: Name of the primary config.
        config_dirs: Folders with the user's YAML files.
        tokens: Number of tokens to train on; None predicts no duration and cost.
        allow: Words of ``keys.ALLOWABLE``. The search may also set their keys, except those that
            are set among the overrides.

    Raises:
        ConfigError: The configuration is invalid, no layout fits, or the run cannot be estimated.
    """

    def compose_and_type(overrides: Sequence[str]) -> tuple[Composed, RunConfig]:
        composed = configuration.compose(
            overrides, config_name=config_name, config_dirs=config_dirs
        )
        return composed, configuration.type_config(
            with_file_placeholders(composed.tree),
            composed.problems,
            origins=composed.origins,
            searched=fixed_keys(composed),
        )

    composed, config = compose_and_type(overrides)
    if asks_for_hardware(config):
        found = with_found_hardware(overrides, config, context=context, config_dirs=config_dirs)
        composed, config = compose_and_type(found)
    return plan_config(
        context,
        config,
        devices=devices,
        fixed=fixed_keys(composed, [*SEARCHED, *allowed_keys([*ALLOWABLE])]),
        config_dirs=config_dirs,
        tokens=tokens,
        allow=allow,
        name="--devices",
    )


def plan_config(
    context: ForkServerContext,
    config: RunConfig,
    *,
    devices: int,
    fixed: Sequence[str] = (),
    config_dirs: Sequence[Path] = (),
    wanted: int = 3,
    tokens: float | None = None,
    allow: Sequence[str] = (),
    name: str = "devices",
) -> Plan:
    """Search the layouts of a configuration.

    Args:
        context: Context of the warm fork server.
        config: Configuration of the run.
        devices: Number of devices.
        fixed: Keys of settings that the search keeps; it sets all others.
        config_dirs: Folders with the user's YAML files.
        wanted: Number of fitting layouts to find.
        tokens: Number of tokens to train on; None predicts no duration and cost.
        allow: Words of ``keys.ALLOWABLE``, see ``plan_run``.
        name: Name of the option or argument with the number of devices, for errors.

    Raises:
        ConfigError: No layout fits, no nodes share the devices equally, or the run cannot be
            estimated.
    """
    if tokens is not None:
        steps_of_tokens(config, tokens)  # raises an error before the search
    config, assumed = with_figures(context, config, devices=devices, config_dirs=config_dirs)
    if reason := uneven_devices(config, devices):
        raise ConfigError([ConfigIssue(name, reason, devices)])
    values = configuration.flatten(config)
    plan: Plan = forked_call.call(
        context,
        "axonlaunch.planning.plan:search",
        replace_with_synthetic(config),
        devices,
        {k: values[k] for k in fixed if k in SEARCHED and not _is_open(k, values[k])},
        wanted,
        LOW_PRECISION in allow,
        [key for key in fixed if key not in SEARCHED],
        task="searching layouts",
    )
    return dataclasses.replace(
        plan,
        assumed=assumed,
        typical=_typical_figures(config),
        candidates=_with_training(config, plan, devices, tokens),
    )


def _is_open(key: str, value: Any) -> bool:
    """Return whether a value of the user leaves the choice to the search."""
    return value == "auto" or (value is None and key != LOSS_CHUNK)


def _typical_figures(config: RunConfig) -> tuple[str, ...]:
    """Return the keys of device memory for which typical figures of other devices stand."""
    hardware = config.hardware
    if hardware is None or estimate_device(config) != "gpu":
        return ()
    names = ("context_mib", "communicator_mib")
    return tuple(f"hardware.{name}" for name in names if getattr(hardware, name) is None)


def with_figures(
    context: ForkServerContext,
    config: RunConfig,
    *,
    devices: int,
    config_dirs: Sequence[Path] = (),
) -> tuple[RunConfig, dict[str, Any]]:
    """Complete the hardware by measured and typical figures; return the typical ones by key.

    Args:
        context: Context of the warm fork server.
        config: Configuration of the run.
        devices: Number of devices.
        config_dirs: Folders with the user's YAML files.

    Raises:
        ConfigError: There is no hardware, or it can't be measured.
    """
    if config.hardware is None:
        available = [*Composer(config_dirs=config_dirs).options("hardware")]
        message = f"is needed: speed and memory depend on the devices; use {one_of(available)}"
        raise ConfigError([ConfigIssue("hardware", message)])
    hardware = config.hardware
    if hardware.is_cpu:
        if nodes(config)[1] > 1:
            message = "is measured on one node; use published hardware, with a network"
            raise ConfigError([ConfigIssue("hardware", message, hardware.name)])
        hardware = measured_hardware.measure_this_node(context, hardware, ranks=devices)
    hardware, assumed = with_assumed_figures(
        hardware, devices=None if describes_nodes(config, devices) else devices
    )
    return with_precision(configuration.with_values(config, {"hardware": hardware})), assumed


def _with_training(
    config: RunConfig, plan: Plan, devices: int, tokens: float | None
) -> list[Planned]:
    """Return the layouts of a plan, with durations and costs if there is a number of tokens."""
    if tokens is None:
        return plan.candidates
    placed = configuration.with_values(config, RunNodes.of_devices(config, devices).settings)
    return [
        dataclasses.replace(
            planned,
            training=training_forecast(
                placed,
                tokens=tokens,
                step_s=planned.step_s,
                saved_bytes=planned.saved_bytes,
            ),
        )
        for planned in plan.candidates
    ]


def search(
    config: RunConfig,
    devices: int,
    fixed: dict[str, Any],
    wanted: int,
    lowers: bool,
    kept: list[str],
) -> Plan:
    """Search layouts in a process forked from the server.

    Args:
        config: Configuration of the run.
        devices: Number of devices.
        fixed: Layout settings of the user.
        wanted: Number of fitting layouts to find.
        lowers: Whether the search may lower the precision.
        kept: Keys of precision that it keeps.

    Raises:
        ConfigError: The model or the data has problems, no layout fits, or the run cannot be
            estimated.
    """
    from axonlaunch.planning.search import search
    from axonlaunch.preflight.checks import check_model_and_data, resolve_anywhere

    forkserver.lead_group()  # tracing forks processes
    import_plugins(config.plugins)
    check_model_and_data(config)

    def check(layout: RunConfig) -> RunConfig:
        if problems := find_rule_violations(layout):
            raise ConfigError(problems)
        return resolve_anywhere(layout)

    return search.search_layouts(
        config,
        devices=devices,
        fixed=fixed,
        check=check,
        wanted=wanted,
        lowers=lowers,
        kept=kept,
    )


def experiment(
    overrides: Sequence[str],
    layout: Sequence[str] = (),
    *,
    config_name: str = "config",
    config_dirs: Sequence[Path] = (),
    numerics: Sequence[str] = (),
) -> str:
    """Return the YAML of an ``experiment`` that is equivalent to these overrides.

    Args:
        overrides: Overrides of the run. If they select an experiment, the new one extends it.
        layout: Overrides of the layout.
        config_name: Name of the primary config.
        config_dirs: Folders with the user's YAML files.
        numerics: Changes of numerics in the layout, which a comment names.

    Raises:
        ConfigError: A file cannot express one of the overrides.
    """
    from hydra.core.override_parser.types import OverrideType
    from omegaconf import OmegaConf

    composer = configuration.composer_of(config_dirs)
    sorted_overrides, _ = composer.sort_overrides([*overrides, *layout], config_name)
    base: list[Any] = []
    options: dict[str, Any] = {}
    for override in sorted_overrides.groups:
        group, option = override.key_or_group, override.value()
        if group == "experiment":
            base = [option] if option else []
        else:
            is_new = override.type == OverrideType.ADD
            options[f"/{group}" if is_new else f"override /{group}"] = option
    values = OmegaConf.create()
    for override in sorted_overrides.values:
        if override.is_delete():
            message = f"{override.input_line}: a file can't delete a key; leave out --write"
            raise ConfigError([ConfigIssue("", message)])
        OmegaConf.update(values, override.key_or_group, override.value(), force_add=True)
    # Entries with "override" must be last in the defaults list.
    groups = sorted(({key: option} for key, option in options.items()), key=_overrides_group)
    content = OmegaConf.create({"defaults": [*base, "_self_", *groups]})
    comment = f"# Changes the numerics of the run: {', '.join(numerics)}\n" if numerics else ""
    return f"# @package _global_\n{comment}{OmegaConf.to_yaml(OmegaConf.merge(content, values))}"


def _overrides_group(default: dict[str, Any]) -> bool:
    return next(iter(default)).startswith("override ")


def allowed_keys(allow: Sequence[str], *, name: str = "--allow") -> list[str]:
    """Return the keys that words of ``keys.ALLOWABLE`` allow a search to set.

    Args:
        allow: Words of the user, such as ``low_precision``.
        name: Name of the option or argument for errors.

    Raises:
        ConfigError: A word is unknown.
    """
    if unknown := [word for word in allow if word not in ALLOWABLE]:
        message = f"is no option of {name}; use {one_of([*ALLOWABLE])}"
        raise ConfigError([ConfigIssue(name, message, word) for word in unknown])
    return [key for word in allow for key in ALLOWABLE[word]]


def fixed_keys(composed: Composed, searched: Sequence[str] = SEARCHED) -> list[str]:
    """Return the searched keys that an override, an experiment or the user's own primary file sets.

    A file that a group selects, such as that of ``strategy=fsdp``, is no such file.
    """
    overrides, files = composed.overridden, composed.in_files()
    return [
        key
        for key in searched
        if (
            _sets(overrides[key], key)
            if key in overrides
            else composed.is_of_run(files.get(key, ""))
        )
    ]


def _sets(override: str, key: str) -> bool:
    """Return whether an override sets this key, and not a group that contains it."""
    return override.lstrip("+").partition("=")[0] == key
