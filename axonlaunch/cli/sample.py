"""``axonlaunch sample``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from axonlaunch.cli.options import Json, Trust, print_json

HELP = "Let a trained model of text continue a prompt."
EXAMPLES = """Examples:

\b
  axonlaunch sample runs/gpt-fsdp --prompt "def "
  axonlaunch sample runs/gpt-fsdp --prompt "class " --tokens 400 --temperature 0.5 --seed 1
  axonlaunch sample exported --prompt "import "
"""


def command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A run with a checkpoint, or exported weights."),
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="Bytes to add.")] = 300,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest byte.")] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Draw among so many likeliest bytes.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Starts the draws.")] = 0,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Let a trained model of text continue a prompt."""
    from axonlaunch.training.sampling import continue_prompt

    text = continue_prompt(
        folder,
        prompt,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        trusted=trust,
    )
    if as_json:
        print_json({"prompt": prompt, "text": text})
    else:
        sys.stdout.write(prompt + text + "\n")
