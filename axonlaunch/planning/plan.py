"""Finds the layouts that fit and are fastest from the parent, which has no torch.

No device, data file or rank takes part. It refuses what can't be traced, and hardware without the
figures that speed takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from axonlaunch import config as configuration
from axonlaunch.config import Composed, Composer, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.errors import one_of
from axonlaunch.config.layout import nodes
from axonlaunch.config.plugins import import_plugins
from axonlaunch.config.rules import find_rule_violations
from axonlaunch.diagnostics.doctor import measured_hardware
from axonlaunch.planning.records import Plan
from axonlaunch.planning.search.keys import SEARCHED
from axonlaunch.planning.tracing.shape_only_data import naming_files, replace_with_synthetic
from axonlaunch.system import forked_call, forkserver


def plan_run(
    context: ForkServerContext,
    overrides: Sequence[str],
    *,
    devices: int,
    config_name: str,
    config_dirs: Sequence[Path],
) -> Plan:
    """Check a configuration and search its layouts.

    Args:
        context: Of the warm fork server.
        overrides: Of the run; a key of the layout that they set stays as it is.
        devices: Ranks.
        config_name: The primary config.
        config_dirs: Folders of a user's own YAML.

    Raises:
        ConfigError: The configuration is wrong, no layout fits, or it can't be estimated.
    """
    composed = configuration.compose(overrides, config_name=config_name, config_dirs=config_dirs)
    config = configuration.type_config(
        naming_files(composed.tree),
        composed.problems,
        origins=composed.origins,
        searched=fixed_keys(composed),
    )
    return search_composed(context, composed, config, devices=devices, config_dirs=config_dirs)


def search_composed(
    context: ForkServerContext,
    composed: Composed,
    config: RunConfig,
    *,
    devices: int,
    config_dirs: Sequence[Path],
    wanted: int = 3,
) -> Plan:
    """Search the layouts of a configuration.

    Args:
        context: Of the warm fork server.
        composed: As composed: a key of the layout that an override set stays as it is.
        config: The same, typed.
        devices: Ranks.
        config_dirs: Folders of a user's own YAML.
        wanted: Layouts that fit.

    Raises:
        ConfigError: No layout fits, or it can't be estimated.
    """
    if config.hardware is None:
        known = [*Composer(config_dirs=config_dirs).options("hardware")]
        message = f"is needed: speed and memory depend on the devices; use {one_of(known)}"
        raise ConfigError([ConfigIssue("hardware", message)])
    hardware = config.hardware
    if hardware.is_cpu:
        if nodes(config)[1] > 1:
            message = "is measured on one node; use published hardware, with a network"
            raise ConfigError([ConfigIssue("hardware", message, hardware.name)])
        hardware = measured_hardware.of_this_node(context, hardware, ranks=devices)
        config = configuration.with_values(config, {"hardware": hardware})
    values = configuration.flatten(config)
    fixed = {key: values[key] for key in fixed_keys(composed)}
    plan: Plan = forked_call.call(
        context,
        "axonlaunch.planning.plan:search",
        replace_with_synthetic(config),
        devices,
        {key: value for key, value in fixed.items() if value not in ("auto", None)},
        wanted,
        task="searching layouts",
    )
    return plan


def search(config: RunConfig, devices: int, fixed: dict[str, Any], wanted: int) -> Plan:
    """Search, in a process forked from the server.

    Raises:
        ConfigError: No layout fits, it can't be estimated, or its model or data can't be made.
    """
    from axonlaunch.models.build import spec_for
    from axonlaunch.planning.search import search
    from axonlaunch.preflight.checks import build_on_meta, resolve_anywhere
    from axonlaunch.preflight.dataset import described_dataset

    forkserver.lead_group()  # it forks a process for each trace
    import_plugins(config.plugins)

    def check(layout: RunConfig) -> RunConfig:
        if problems := find_rule_violations(layout):
            raise ConfigError(problems)
        return resolve_anywhere(layout)

    try:
        return search.search_layouts(
            config, devices=devices, fixed=fixed, check=check, wanted=wanted
        )
    except Exception as error:
        # Where a model or data can't be made, say so, rather than what became of it in a trace.
        build_on_meta(config, spec_for(config))
        if issues := described_dataset(config)[1]:
            raise ConfigError(issues) from error
        raise


def experiment(
    overrides: Sequence[str],
    layout: Sequence[str] = (),
    *,
    config_name: str = "config",
    config_dirs: Sequence[Path] = (),
) -> str:
    """Return YAML of the group ``experiment`` that says what these overrides say.

    Args:
        overrides: Of the run, as given; one of the group itself is what the new one begins with.
        layout: Of the layout.
        config_name: The primary config.
        config_dirs: Folders of a user's own YAML.

    Raises:
        ConfigError: A file can't say one of them.
    """
    from hydra.core.override_parser.types import OverrideType
    from omegaconf import OmegaConf

    composer = configuration.composer_of(config_dirs)
    asked, _ = composer.sort_overrides([*overrides, *layout], config_name)
    begun: list[Any] = []
    chosen: dict[str, Any] = {}
    for override in asked.groups:
        group, option = override.key_or_group, override.value()
        if group == "experiment":
            begun = [option] if option else []
        else:
            is_new = override.type == OverrideType.ADD
            chosen[f"/{group}" if is_new else f"override /{group}"] = option
    values = OmegaConf.create()
    for override in asked.values:
        if override.is_delete():
            message = f"{override.input_line}: a file can't take a key away; leave out --write"
            raise ConfigError([ConfigIssue("", message)])
        OmegaConf.update(values, override.key_or_group, override.value(), force_add=True)
    # What an experiment overrides has to stand last in its list.
    groups = sorted(({key: option} for key, option in chosen.items()), key=_overrides_group)
    content = OmegaConf.create({"defaults": [*begun, "_self_", *groups]})
    return f"# @package _global_\n{OmegaConf.to_yaml(OmegaConf.merge(content, values))}"


def _overrides_group(default: dict[str, Any]) -> bool:
    return next(iter(default)).startswith("override ")


def fixed_keys(composed: Composed) -> list[str]:
    """Return the keys of a layout that an override sets, each by itself."""
    given = composed.given
    return [key for key in SEARCHED if key in given and _sets(given[key], key)]


def _sets(override: str, key: str) -> bool:
    """Say whether an override is of a key itself, not of what it is in."""
    return override.lstrip("+").partition("=")[0] == key
