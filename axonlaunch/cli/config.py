"""``axonlaunch config``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from axonlaunch.cli.options import ConfigDir, ConfigName, Json, Overrides, print_json

HELP = "Print the resolved configuration."
EXAMPLES = """Examples:

\b
  axonlaunch config strategy=hsdp
  axonlaunch config strategy=hsdp --explain
"""


def command(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    explain: Annotated[
        bool, typer.Option("--explain", help="Say of each value which file or override set it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the resolved configuration."""
    from axonlaunch import config as configuration

    composed = configuration.compose(
        overrides or [], config_name=config_name, config_dirs=config_dir or []
    )
    config = configuration.typed(composed.tree, composed.problems, origins=composed.origins)
    if not explain:
        if as_json:
            print_json(configuration.to_tree(config))
        else:
            sys.stdout.write(configuration.to_yaml(config))
        return
    from axonlaunch.config.problem import plain

    values = configuration.leaves(config)
    told = composed.origins()
    origins = {key: told.get(key, configuration.DEFAULT_ORIGIN) for key in values}
    if as_json:
        print_json({key: {"value": value, "origin": origins[key]} for key, value in values.items()})
        return
    width = max(len(f"{key}={plain(value)}") for key, value in values.items())
    for key, value in values.items():
        sys.stdout.write(f"{f'{key}={plain(value)}':<{min(width, 56)}}  {origins[key]}\n")
