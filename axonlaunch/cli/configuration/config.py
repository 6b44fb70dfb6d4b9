"""``axonlaunch config``."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axonlaunch.cli.shared.options import ConfigDir, ConfigName, Json, Overrides, print_json, refuse

if TYPE_CHECKING:
    from axonlaunch.config import RunConfig

HELP = "Print the resolved configuration."
EXAMPLES = """Examples:

\b
  axonlaunch config strategy=hsdp
  axonlaunch config strategy=hsdp --explain
  axonlaunch config model=llama_debug --describe
  axonlaunch config --schema > axonlaunch-schema.json
"""


def command(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    explain: Annotated[
        bool, typer.Option("--explain", help="Show which file or override set each value.")
    ] = False,
    describe: Annotated[
        bool, typer.Option("--describe", help="Describe each key and its allowed values.")
    ] = False,
    schema: Annotated[
        bool,
        typer.Option("--schema", help="Print the JSON schema of configuration files, for editors."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the configuration that a run on this node would use."""
    from axonlaunch import config as configuration
    from axonlaunch.config.code.resolve_auto import resolve_auto
    from axonlaunch.config.composition.origins import origins_of

    if explain + describe + schema > 1:
        refuse("use only one of --explain, --describe and --schema")
    if schema:
        print_json(schema_of_files(config_dir or []))
        return
    composed = configuration.compose(
        overrides or [], config_name=config_name, config_dirs=config_dir or []
    )
    config = configuration.type_config(composed.tree, composed.problems, origins=composed.origins)
    config = resolve_auto(config, accelerators=_accelerators())
    if explain:
        _explain(config, origins_of(composed, config), as_json)
    elif describe:
        _describe(config, as_json)
    elif as_json:
        print_json(configuration.to_tree(config))
    else:
        sys.stdout.write(configuration.to_yaml(config))


def schema_of_files(config_dirs: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the JSON schema of configuration files, with the options in the user's folders."""
    from axonlaunch import config as configuration
    from axonlaunch.config.validation.json_schema import json_schema

    composer = configuration.composer_of(config_dirs)
    groups = composer.groups()
    return json_schema({group: [*composer.options(group)] for group in groups})


def write_schema(folder: Path) -> None:
    """Write the JSON schema to a folder with configuration files.

    Raises:
        OSError: The file can't be written.
    """
    from axonlaunch.config.validation.json_schema import FILE_NAME
    from axonlaunch.system.storage.files import replace_text

    replace_text(folder / FILE_NAME, json.dumps(schema_of_files(), indent=1) + "\n")


def _accelerators() -> int:
    """Count accelerators; ``train`` resolves ``auto`` with this count."""
    from axonlaunch.launch.environment.accelerators import count_accelerators
    from axonlaunch.system.processes import forkserver
    from axonlaunch.system.text.spinner import spinner

    with spinner("detecting accelerators"), forkserver.on_demand() as server:
        return count_accelerators(server)


def _explain(config: RunConfig, origins: dict[str, str], as_json: bool) -> None:
    """Print each value and its origin."""
    from axonlaunch import config as configuration
    from axonlaunch.config.problems.errors import plain

    values = configuration.flatten(config)
    if as_json:
        print_json({key: {"value": value, "origin": origins[key]} for key, value in values.items()})
        return
    width = max(len(f"{key}={plain(value)}") for key, value in values.items())
    for key, value in values.items():
        sys.stdout.write(f"{f'{key}={plain(value)}':<{min(width, 56)}}  {origins[key]}\n")


def _describe(config: RunConfig, as_json: bool) -> None:
    from axonlaunch.config.problems.errors import plain
    from axonlaunch.config.validation.key_reference import reference

    keys = reference(config)
    if as_json:
        print_json(
            {
                key.name: {"value": key.value, "allowed": key.allowed, "meaning": key.meaning}
                for key in keys
            }
        )
        return
    fill = partial(textwrap.fill, width=min(100, shutil.get_terminal_size().columns))
    for key in keys:
        sys.stdout.write(f"{key.name}={plain(key.value)}\n")
        for text in (key.allowed, key.meaning):
            if text:
                sys.stdout.write(fill(text, initial_indent="    ", subsequent_indent="    ") + "\n")
