"""``axonlaunch sample``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from axonlaunch.cli.shared.options import Json, Trust, escape_unprintable, print_json, refuse

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
  axonlaunch sample runs/llama-fsdp --chat --prompt "What is a list?" \\
      --system "Answer in one sentence." --top-p 0.9
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
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            min=1e-6,
            max=1,
            help="Sample only from the fewest tokens that together have the probability P.",
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="System message of the conversation, with --chat."),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="SEED", min=0, max=2**63 - 1, help="Random seed.")
    ] = 0,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Generate text from a trained run."""
    if system is not None and not chat:
        refuse("is a message of a conversation; add --chat", option="--system", value=system)
    from axonlaunch.training.text.sampling_options import SamplingOptions

    options = SamplingOptions(
        tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    if chat:
        from axonlaunch.training.text.conversation import Conversation
        from axonlaunch.training.text.sampling import load_text_model

        trained = load_text_model(folder, trusted=trust)
        conversation = Conversation(trained, options, system=system)
        if prompt is None and not as_json and sys.stdin.isatty():
            limits = f"{tokens} tokens an answer, {trained.context_length:,} in all"
            sys.stderr.write(f"{folder}: up to {limits}; Ctrl-D ends the conversation\n")
        with _restored_terminal():
            _answer(conversation, prompt, as_json=as_json)
        return
    from axonlaunch.training.text.sampling import continue_prompt

    prompt = _PROMPT if prompt is None else prompt
    text = continue_prompt(folder, prompt, options, trusted=trust)
    if as_json:
        print_json({"prompt": prompt, "text": text})
    else:
        sys.stdout.write(_shown(prompt + text) + "\n")


@contextmanager
def _restored_terminal() -> Iterator[None]:
    """End the line and restore the terminal's settings if Ctrl-C or Ctrl-D ends the context."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    settings = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)
        sys.stderr.write("\n")  # Ctrl-C and Ctrl-D leave the cursor after the prompt
        sys.stderr.flush()


def _answer(conversation: Conversation, prompt: str | None, *, as_json: bool) -> None:
    """Answer a prompt, or each line of standard input until it ends."""
    shows_prompts = sys.stdin.isatty() and not as_json
    for line in _lines(shows_prompts=shows_prompts) if prompt is None else [prompt]:
        answer = conversation.answer(line)
        if not as_json:
            sys.stdout.write(f"{_shown(answer)}\n")
            sys.stdout.flush()
    if as_json:
        print_json({"messages": conversation.messages})


def _shown(text: str) -> str:
    """Return a model's text; for a terminal, without characters that control it."""
    if not sys.stdout.isatty():
        return text
    return "\t".join(escape_unprintable(part) for part in text.split("\t"))


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
