"""``axonlaunch sample``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from axonlaunch.cli.shared.options import Json, Trust, print_json

if TYPE_CHECKING:
    from axonlaunch.training.text.conversation import Conversation

HELP = "Generate text from a trained run."
EXAMPLES = """Examples:

\b
  axonlaunch sample runs/gpt-fsdp --prompt "def "
  axonlaunch sample runs/gpt-fsdp --prompt "class " --tokens 400 \\
      --temperature 0.5 --seed 1
  axonlaunch sample exported --prompt "import "
  axonlaunch sample runs/llama-fsdp --chat
  axonlaunch sample runs/llama-fsdp --chat --prompt "What is a list?"
"""
_PROMPT = "def "


def command(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Folder of a run with a checkpoint, or of exported weights."
        ),
    ],
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help='Prompt to continue, or with --chat to answer; default: "def ".'
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Answer each line of standard input, with the tokenizer's chat template.",
        ),
    ] = False,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Number of new tokens.")] = 300,
    temperature: Annotated[
        float,
        typer.Option(metavar="T", min=0, help="Sampling temperature; 0 is greedy decoding."),
    ] = 0.8,
    top_k: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="Sample only from the K most likely tokens."),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="SEED", min=0, max=2**63 - 1, help="Random seed.")
    ] = 0,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Generate text from a trained run."""
    if chat:
        from axonlaunch.training.text.conversation import Conversation
        from axonlaunch.training.text.sampling import load_text_model

        trained = load_text_model(folder, trusted=trust)
        conversation = Conversation(
            trained, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
        )
        _answer(conversation, prompt, as_json=as_json)
        return
    from axonlaunch.training.text.sampling import continue_prompt

    prompt = _PROMPT if prompt is None else prompt
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


def _answer(conversation: Conversation, prompt: str | None, *, as_json: bool) -> None:
    """Answer a prompt, or each line of standard input until it ends."""
    shows_prompts = sys.stdin.isatty() and not as_json
    for line in _lines(shows_prompts=shows_prompts) if prompt is None else [prompt]:
        answer = conversation.answer(line)
        if not as_json:
            sys.stdout.write(f"{answer}\n")
            sys.stdout.flush()
    if as_json:
        print_json({"messages": conversation.messages})


def _lines(*, shows_prompts: bool) -> Iterator[str]:
    """Yield the non-empty lines of standard input."""
    while True:
        if shows_prompts:
            sys.stderr.write("> ")
            sys.stderr.flush()
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.strip()
