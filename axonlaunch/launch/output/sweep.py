"""The runs of a sweep beside each other: what distinguishes them, and how each ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from axonlaunch.config import RunConfig
from axonlaunch.launch.output.console import shortened
from axonlaunch.system.formatting import quantity

_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")


def varied(runs: Sequence[Sequence[str]]) -> list[str]:
    """Return of each run's overrides those that not all runs have, as one would write them."""
    common = set(runs[0]).intersection(*runs[1:])
    return [written([word for word in words if word not in common]) for words in runs]


def written(words: Sequence[str]) -> str:
    """Return overrides of a run as one would write them, without what Hydra's sweeper escapes."""
    return _ESCAPED.sub(r"\1", " ".join(words))


def again(configs: Sequence[RunConfig]) -> str:
    """Return what is to be added to a sweep's command so that it resumes."""
    parents = {config.name.rpartition("/")[0] for config in configs}
    numbers = [config.name.rpartition("/")[2] for config in configs]
    is_numbered = numbers == [str(number) for number in range(len(configs))]
    return f" with name={parents.pop()}" if is_numbered and len(parents) == 1 else ""


def print_run_header(
    words: str, *, number: int, of: int, stream: TextIO, is_done: bool = False
) -> None:
    """Print which run begins, or that it was done before.

    Args:
        words: What distinguishes it from the others.
        number: From 1 on.
        of: Runs of the sweep.
        stream: Where to.
        is_done: Whether it was done before, and nothing begins.
    """
    done = " (finished before)" if is_done else ""
    text = Text(f"run {number} of {of}: {words}{done}", style="bold")
    _console(stream).print(text, soft_wrap=True)


def print_sweep_table(
    words: Sequence[str], summaries: Sequence[dict[str, Any]], *, stream: TextIO
) -> None:
    """Print how each run ended, or that it was not started; the least loss stands out.

    Args:
        words: What distinguishes each run from the others.
        summaries: Of the runs that were started, in order.
        stream: Where to.
    """
    judged = "eval_loss" if any(one.get("eval_loss") is not None for one in summaries) else "loss"
    losses = [one[judged] for one in summaries if one.get(judged) is not None]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("run", overflow="fold")
    for name in ("loss", "evaluation loss", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("run folder", overflow="fold")
    for label, one in zip(words, summaries, strict=False):
        is_best = one.get(judged) is not None and one[judged] == min(losses)
        failed = "" if one["status"] == "done" else f" ({one['status']})"
        table.add_row(
            label + failed,
            _loss(one.get("loss")),
            _loss(one.get("eval_loss")),
            "" if one.get("tokens_per_s") is None else quantity(one["tokens_per_s"]),
            shortened(one["run_dir"]),
            style="bold" if is_best else "",
        )
    for label in words[len(summaries) :]:
        table.add_row(f"{label} (not started)")
    _console(stream).print(table)


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"


def _console(stream: TextIO) -> Console:
    return Console(file=stream, highlight=False)
