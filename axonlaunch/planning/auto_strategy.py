"""Selects the layout of runs with ``strategy=auto``, with the search of ``axonlaunch plan``.

The layout is added to the configuration as if the user had written it. A node with a speed that is
neither published nor measured is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

from axonlaunch import config as configuration
from axonlaunch.config import Composed, RunConfig
from axonlaunch.config.consistency.layout import num_ranks, resolved
from axonlaunch.planning.plan import allowed_keys, fixed_keys, plan_config
from axonlaunch.planning.search.found_hardware import (
    asks_for_hardware,
    device_names,
    hardware_option,
    with_found_hardware,
)
from axonlaunch.planning.search.keys import ALLOWABLE

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
    as_given = composed
    if asks_for_hardware(config):
        overrides = with_found_hardware(
            overrides, config, context=server(), config_dirs=config_dirs
        )
        composed, config = compose_and_type(overrides)
    if not config.strategy.auto:
        return as_given, config
    context = server()
    devices = device_names(context, config)
    nproc = resolved(config, accelerators=len(devices)).launch.nproc
    if config.hardware is None:
        option = hardware_option(devices, config, config_dirs)
        composed, config = compose_and_type([*overrides, f"hardware={option}"])
    assert config.hardware is not None
    config = configuration.with_values(config, {"launch.nproc": nproc})
    ranks = num_ranks(config)
    print(f"planning the layout of {ranks} ranks", file=sys.stderr)
    plan = plan_config(
        context,
        config,
        devices=ranks,
        # Training has no --allow, so no error may suggest it.
        fixed=[*fixed_keys(composed), *allowed_keys([*ALLOWABLE])],
        config_dirs=config_dirs,
        wanted=1,
    )
    best = plan.candidates[0]
    print(f"planned {best.layout}: the fastest of {plan.searched} layouts", file=sys.stderr)
    layout = [word for word in best.overrides if not word.startswith("launch.")]
    _, config = compose_and_type([*overrides, *layout])
    planned = {"strategy.auto": False, "launch.nproc": nproc}
    return as_given, configuration.with_values(config, planned)
