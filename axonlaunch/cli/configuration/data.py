"""``axonlaunch data show | prepare``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axonlaunch.cli.command_help import Command, Subcommands
from axonlaunch.cli.shared.options import (
    ConfigDir,
    ConfigName,
    Json,
    Overrides,
    print_json,
    show_help,
)
from axonlaunch.system.text.spinner import spinner
from axonlaunch.system.text.terminal import console_on

if TYPE_CHECKING:
    from rich.text import Text

    from axonlaunch.config import RunConfig
    from axonlaunch.data.datasets.document_parts import TextSummary
    from axonlaunch.data.texts.mix import AnyText

HELP = "Show the rows of texts. Tokenizes documents and chats before a run, too."
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
    cls=Subcommands, help=HELP, epilog=EXAMPLES, rich_markup_mode=None, invoke_without_command=True
)


data_app.callback()(show_help)


@data_app.command(
    "show", cls=Command, help="Show the first rows of a run; tokens that count are marked."
)
def show_rows(
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(metavar="N", min=1, help="Number of rows.")] = 3,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    as_json: Json = False,
) -> None:
    """Show the tokens of the first rows of a run; tokens that count in the loss are marked."""
    config = _load(overrides or [], config_dir, config_name)
    dataset, _ = _tokenized_dataset(config)
    rows = _first_rows(dataset, samples, seed=config.seed)
    if as_json:
        print_json({**_to_json_dicts(dataset.summaries()), "samples": rows})
        return

    console = console_on(soft_wrap=True)
    for row in rows:
        console.print(f"row {row['row']}", style="bold")
        for piece in row["pieces"]:
            console.print(piece["source"], style="dim", markup=False)
            console.print(_mark_tokens(piece, in_color=console.color_system is not None))
    mark = "green" if console.color_system is not None else "⟦in brackets⟧"
    console.print(f"Tokens that count in the loss are {mark}.", style="dim")
    _print_notes(dataset)


@data_app.command(
    "prepare", cls=Command, help="Tokenize files into the cache; an interrupted call resumes."
)
def prepare_data(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    as_json: Json = False,
) -> None:
    """Tokenize files into the cache. An interrupted call resumes where it stopped."""
    started = time.perf_counter()
    dataset, is_new = _tokenized_dataset(_load(overrides or [], config_dir, config_name))
    seconds, summaries = time.perf_counter() - started, dataset.summaries()
    if as_json:
        content = {**_to_json_dicts(summaries), "tokenized": is_new, "seconds": seconds}
        print_json({**content, "folder": str(dataset.folder)})
        return
    _print_notes(dataset)
    for name, summary in summaries.items():
        share = summary.counted_tokens / max(1, summary.tokens)
        longest = f"the longest document has {summary.longest_document:,} tokens"
        _print(f"{name}{': ' if name else ''}{share:.1%} of tokens count in the loss; {longest}")
    done = f"tokenized in {seconds:.1f} s" if is_new else "already tokenized"
    _print(f"{done}; tokens are in {dataset.folder}")


def _load(overrides: Sequence[str], config_dirs: list[Any] | None, config_name: str) -> RunConfig:
    """Load a configuration. ``model.path`` without ``model`` selects ``model=hf``.

    Raises:
        ConfigError: The configuration is invalid, or its dataset is not tokenized.
    """
    from axonlaunch import config as configuration
    from axonlaunch.config.options.data import DATASETS

    names = [override.partition("=")[0].lstrip("+") for override in overrides]
    if "model.path" in names and "model" not in names:
        overrides = ["model=hf", *overrides]
    config = configuration.load(overrides, config_name=config_name, config_dirs=config_dirs or [])
    facts = DATASETS.facts(config.data.name)
    if facts is None or not facts.takes_tokenizer:
        message = "this dataset has no tokenizer; use data=documents or data=chat"
        issue = configuration.ConfigIssue("data.name", message, config.data.name)
        raise configuration.ConfigError([issue])
    return config


def _tokenized_dataset(config: RunConfig) -> tuple[AnyText, bool]:
    """Return the dataset, and whether any of its files had to be tokenized.

    Raises:
        ConfigError: A file can't be read, or a row is invalid.
    """
    from axonlaunch.data import build_dataset
    from axonlaunch.data.selection.pinning import fetch_data, pinned_data
    from axonlaunch.data.shards.encoding import Tokenizing
    from axonlaunch.data.tokenizers.tokenizer_files import tokenizer_of

    is_new = False
    with spinner("reading") as show_progress:

        def report(state: Tokenizing) -> None:
            nonlocal is_new
            is_new = is_new or not (state.waits or state.verifies)
            show_progress(str(state))

        text: Any = config.data
        pinned = pinned_data(text, earlier={})
        fetch_data(pinned, report=lambda state: show_progress(str(state)))
        dataset: Any = build_dataset(pinned, tokenizer_of(config), report=report, verifies=True)
    return dataset, is_new


def _to_json_dicts(summaries: dict[str, TextSummary]) -> dict[str, Any]:
    """Return the counts of a dataset; of a mix, the counts of each source by name."""
    objects = {name: asdict(summary) for name, summary in summaries.items()}
    return objects.get("", {"sources": objects})


def _first_rows(dataset: AnyText, count: int, *, seed: int) -> list[dict[str, Any]]:
    """Return the first rows that a run with this seed trains on."""
    import numpy as np

    from axonlaunch.data.datasets.loader import order_of
    from axonlaunch.data.tokenizers.tokenizer import token_texts

    available = dataset.num_samples or count
    rows = order_of(dataset, np.arange(min(count, available)), seed=seed)
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


def _mark_tokens(piece: dict[str, Any], *, in_color: bool) -> Text:
    """Return a document's text: color marks tokens that count; shades alternate by token."""
    from rich.text import Text

    text, counted_before = Text(), False
    for number, (token, counted) in enumerate(zip(piece["texts"], piece["counted"], strict=True)):
        shade = "" if number % 2 else "dim "
        color = f"{shade}green" if counted else f"{shade}default"
        if not in_color and counted != counted_before:
            text.append("⟦" if counted else "⟧")
        text.append(_visible(token), style=color)
        counted_before = counted
    return text.append("⟧" if counted_before and not in_color else "")


def _visible(token: str) -> str:
    """Return a token's text with unprintable characters escaped and newlines marked."""
    shown = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in token)
    return shown.replace("\n", "↵\n")


def _print_notes(dataset: AnyText) -> None:
    for note in dataset.info.notes:
        _print(note)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
