"""Selects the layout of runs with ``strategy=auto``, with the search of ``axonlaunch plan``.

The layout is added to the configuration as if the user had written it. A node with a speed that is
neither published nor measured is an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from axonlaunch import config as configuration
from axonlaunch.config import Composed, Composer, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.consistency.layout import is_on_cpu, nodes, num_ranks, resolved
from axonlaunch.config.problems.errors import one_of
from axonlaunch.planning.plan import fixed_keys, plan_config
from axonlaunch.system.processes import forked_call

Compose = Callable[[Sequence[str]], Composed]


def load_auto_strategy(
    overrides: Sequence[str],
    *,
    compose: Compose,
    server: Callable[[], ForkServerContext],
    config_dirs: Sequence[Path],
) -> tuple[Composed, RunConfig]:
    """Return the composed values of a run and its configuration, with a searched layout if needed.

    Args:
        overrides: Overrides of the run.
        compose: Composes a configuration from overrides on the node that will run it.
        server: Starts the fork server if it is not running yet.
        config_dirs: Folders with the user's YAML files.

    Raises:
        ConfigError: The configuration is invalid, or no layout was found.
    """

    def compose_and_type(arguments: Sequence[str]) -> tuple[Composed, RunConfig]:
        composed = compose(arguments)
        strategy = composed.tree.get("strategy")
        is_searched = isinstance(strategy, dict) and strategy.get("auto") is True
        return composed, configuration.type_config(
            composed.tree,
            composed.problems,
            origins=composed.origins,
            searched=fixed_keys(composed) if is_searched else (),
        )

    composed, config = compose_and_type(overrides)
    as_asked = composed
    if not config.strategy.auto:
        return as_asked, config
    context = server()
    devices = _devices(context, config)
    nproc = resolved(config, accelerators=len(devices)).launch.nproc
    if config.hardware is None:
        option = _option(devices, config, config_dirs)
        composed, config = compose_and_type([*overrides, f"hardware={option}"])
    assert config.hardware is not None
    if config.hardware.devices_per_node is None and nodes(config)[1] == 1:
        config = configuration.with_values(config, {"hardware.devices_per_node": nproc})
    ranks = num_ranks(configuration.with_values(config, {"launch.nproc": nproc}))
    print(f"planning the layout of {ranks} ranks", file=sys.stderr)
    plan = plan_config(
        context,
        config,
        devices=ranks,
        fixed=fixed_keys(composed),
        config_dirs=config_dirs,
        wanted=1,
    )
    best = plan.candidates[0]
    print(f"planned {best.layout}: the fastest of {plan.searched} layouts", file=sys.stderr)
    layout = [word for word in best.overrides if not word.startswith("launch.")]
    _, config = compose_and_type([*overrides, *layout])
    planned = {"strategy.auto": False, "launch.nproc": nproc}
    return as_asked, configuration.with_values(config, planned)


def _devices(context: ForkServerContext, config: RunConfig) -> list[str]:
    """Return the names of this node's devices that the run would use; empty on a CPU."""
    if is_on_cpu(config.launch):
        return []
    target = "axonlaunch.diagnostics.doctor.machine:machine"
    machine: dict[str, Any] = forked_call.call(context, target, task="looking at this node")
    return [device["name"] for device in machine["devices"]] if machine["nccl"]["devices"] else []


def _option(devices: Sequence[str], config: RunConfig, config_dirs: Sequence[Path]) -> str:
    """Return the option of the group ``hardware`` that describes the nodes of a run.

    Raises:
        ConfigError: No option describes them.
    """
    options = Composer(config_dirs=config_dirs).contents("hardware")
    if config.launch.name == "slurm":
        reason = "the job runs on other nodes"
    elif not devices:
        return "cpu"
    else:
        for name, tree in options.items():
            if (pattern := tree.get("device")) and re.search(str(pattern), devices[0]):
                return name
        reason = f"{devices[0]} is not in the catalog"
    message = f"strategy=auto needs figures of the devices, and {reason}; use {one_of([*options])}"
    raise ConfigError([ConfigIssue("hardware", message)])
