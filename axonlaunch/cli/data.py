"""``axonlaunch data show | prepare``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axonlaunch.cli.options import ConfigDir, ConfigName, Json, Overrides, print_json, show_help
from axonlaunch.launch.output.spinner import spinner
from axonlaunch.system.terminal import console_on

if TYPE_CHECKING:
    from rich.text import Text

    from axonlaunch.config import RunConfig
    from axonlaunch.data.document_parts import TextSummary
    from axonlaunch.data.mix import AnyText

HELP = "Tokenise documents and chats ahead of a run, and show rows."
EXAMPLES = """Examples:

\b
  axonlaunch data show data=chat 'data.files=[train.jsonl]' \\
      tokenizer.path=./Qwen3-0.6B
  axonlaunch data show data=documents 'data.files=["corpus/*.parquet"]' \\
      --samples 1 --json
  axonlaunch data prepare data=chat 'data.files=[train.jsonl]' \\
      model.path=./Qwen3-0.6B
"""
data_app = typer.Typer(
    help=HELP, epilog=EXAMPLES, rich_markup_mode=None, invoke_without_command=True
)


data_app.callback()(show_help)


@data_app.command("show", help="Show tokens, and which count, of the first rows of a run.")
def show_rows(
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of rows.")] = 3,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    as_json: Json = False,
) -> None:
    """Show tokens, and which count, of the first rows of a run."""
    config = _load(overrides or [], config_dir, config_name)
    dataset, _ = _tokenised_dataset(config)
    rows = _first_rows(dataset, samples, seed=config.seed)
    if as_json:
        print_json({**_to_json_dicts(dataset.summaries()), "samples": rows})
        return

    console = console_on(soft_wrap=True)
    for row in rows:
        console.print(f"row {row['row']}", style="bold")
        for piece in row["pieces"]:
            console.print(piece["source"], style="dim", markup=False)
            console.print(_mark_tokens(piece, in_colour=console.color_system is not None))
    meaning = "green" if console.color_system is not None else "⟦between brackets⟧"
    console.print(f"What counts is {meaning}.", style="dim")
    _print_notes(dataset)


@data_app.command("prepare", help="Tokenise files into the cache; an interrupted one resumes.")
def prepare_data(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    as_json: Json = False,
) -> None:
    """Tokenise files into the cache; an interrupted one resumes."""
    started = time.perf_counter()
    dataset, made = _tokenised_dataset(_load(overrides or [], config_dir, config_name))
    seconds, summaries = time.perf_counter() - started, dataset.summaries()
    if as_json:
        content = {**_to_json_dicts(summaries), "tokenised": made, "seconds": seconds}
        print_json({**content, "folder": str(dataset.folder)})
        return
    _print_notes(dataset)
    for name, summary in summaries.items():
        share = summary.counted_tokens / max(1, summary.tokens)
        longest = f"the longest document has {summary.longest_document:,}"
        _print(f"{name}{': ' if name else ''}{share:.1%} of the tokens count; {longest}")
    done = f"tokenised in {seconds:.1f} s" if made else "it was tokenised before"
    _print(f"{done}; the tokens are in {dataset.folder}")


def _load(overrides: Sequence[str], config_dirs: list[Any] | None, config_name: str) -> RunConfig:
    """Compose a configuration; a model's path stands for the model, whose tokenizer it is.

    Raises:
        ConfigError: It can't be composed, or its data is not tokenised.
    """
    from axonlaunch import config as configuration
    from axonlaunch.config.data import DATASETS

    names = [override.partition("=")[0].lstrip("+") for override in overrides]
    if "model.path" in names and "model" not in names:
        overrides = ["model=hf", *overrides]
    config = configuration.load(overrides, config_name=config_name, config_dirs=config_dirs or [])
    facts = DATASETS.facts(config.data.name)
    if facts is None or not facts.takes_tokenizer:
        message = "its rows are not tokenised; use data=documents or chat"
        issue = configuration.ConfigIssue("data.name", message, config.data.name)
        raise configuration.ConfigError([issue])
    return config


def _tokenised_dataset(config: RunConfig) -> tuple[AnyText, bool]:
    """Return the dataset, and whether anything was not tokenised yet.

    Raises:
        ConfigError: A file can't be read, or a row is none.
    """
    from axonlaunch.data import build_dataset
    from axonlaunch.data.encoding import Tokenising
    from axonlaunch.data.tokenizer import tokenizer_of

    made = False
    with spinner("reading") as show_progress:

        def report(state: Tokenising) -> None:
            nonlocal made
            made = made or not (state.waits or state.verifies)
            show_progress(str(state))

        dataset: Any = build_dataset(
            config.data, tokenizer_of(config), report=report, verifies=True
        )
    return dataset, made


def _to_json_dicts(summaries: dict[str, TextSummary]) -> dict[str, Any]:
    """Return what there is, of several sources of a mix by their names."""
    objects = {name: asdict(summary) for name, summary in summaries.items()}
    return objects.get("", {"sources": objects})


def _first_rows(dataset: AnyText, count: int, *, seed: int) -> list[dict[str, Any]]:
    """Return the rows that a run of this seed begins with."""
    import numpy as np

    from axonlaunch.data.loader import order_of
    from axonlaunch.data.tokenizer import token_texts

    known = dataset.num_samples or count
    rows = order_of(dataset, np.arange(min(count, known)), seed=seed)
    return [
        {
            "row": int(row),
            "pieces": [
                {
                    "source": source,
                    "tokens": piece.tokens.tolist(),
                    "counted": [False, *piece.counted[1:].tolist()],
                    "texts": token_texts(dataset.tokenizer, piece.tokens.tolist()),
                }
                for source, piece in dataset.sources(int(row))
            ],
        }
        for row in rows
    ]


def _mark_tokens(piece: dict[str, Any], *, in_colour: bool) -> Text:
    """Return a document's tokens: by colour what counts, by shade where each begins."""
    from rich.text import Text

    text, counted_before = Text(), False
    for number, (token, counted) in enumerate(zip(piece["texts"], piece["counted"], strict=True)):
        shade = "" if number % 2 else "dim "
        colour = f"{shade}green" if counted else f"{shade}default"
        if not in_colour and counted != counted_before:
            text.append("⟦" if counted else "⟧")
        text.append(_visible(token), style=colour)
        counted_before = counted
    return text.append("⟧" if counted_before and not in_colour else "")


def _visible(token: str) -> str:
    """Return a token's text without what would move a terminal's cursor, but for newlines."""
    shown = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in token)
    return shown.replace("\n", "↵\n")


def _print_notes(dataset: AnyText) -> None:
    for note in dataset.info.notes:
        _print(note)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
