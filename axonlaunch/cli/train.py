"""``axonlaunch train``."""

from __future__ import annotations

from typing import Annotated

import typer

from axonlaunch.cli.options import ConfigDir, ConfigName, Json, Overrides, print_json

HELP = "Train a model."
EXAMPLES = """Examples:

\b
  axonlaunch train +strategy=fsdp
  axonlaunch train strategy=ddp model=llama_debug launch.nproc=4
  axonlaunch train data=text 'data.files=["notes/*.md"]' name=notes
  axonlaunch train -m optimizer.lr=1e-3,3e-3 model.num_hidden_layers=2,4
"""


def command(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="Run every combination of a=1,2, in turn.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model."""
    from axonlaunch.cli.app import STARTED
    from axonlaunch.launch import forkserver

    with forkserver.warm() as context:
        # Imported only now, while the server imports torch on another core.
        from axonlaunch.launch.start import start

        status, summaries = start(
            context,
            overrides or [],
            config_name=config_name,
            config_dirs=config_dir or [],
            multirun=multirun,
            started=STARTED,
            as_json=as_json,
        )
    if as_json:
        print_json({"runs": summaries} if multirun else summaries[0])
    raise typer.Exit(status)
