"""Arguments and options that several commands share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Groups and values, in Hydra's syntax."),
]
ConfigDir = Annotated[
    list[Path] | None,
    typer.Option(
        "--config-dir", help="Folder of your own YAML, searched before ours.", show_default=False
    ),
]
ConfigName = Annotated[str, typer.Option("--config-name", help="Primary config.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def print_json(content: dict[str, Any]) -> None:
    """Print one object on standard output."""
    sys.stdout.write(json.dumps(content, indent=1) + "\n")
