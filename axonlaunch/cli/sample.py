"""``axonlaunch sample``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from axonlaunch.cli.options import Json, Trust, print_json

HELP = "Generate text from a trained run."
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
    prompt: Annotated[str, typer.Option(help="Prompt to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="Number of new tokens.")] = 300,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 = greedy.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the top-k tokens.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed.")] = 0,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Generate text from a trained run."""
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
