"""``axonlaunch estimate``."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axonlaunch.cli.shared.options import (
    ConfigDir,
    ConfigName,
    Json,
    Overrides,
    TokenCount,
    check_tokens,
    print_json,
)
from axonlaunch.cli.shared.plotting import check_plot, save
from axonlaunch.launch.local.preload_rules import preloads
from axonlaunch.system.text.spinner import spinner
from axonlaunch.system.text.terminal import console_on

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

    from rich.console import Console

    from axonlaunch.config import RunConfig
    from axonlaunch.planning.records import (
        Forecast,
        Remedy,
        RoutingForecast,
        Searched,
        TrainingForecast,
    )

_LABEL = 14
"""Width of the column of labels in front of conclusions."""

HELP = "Estimate peak memory per rank. Needs no GPU and no data; any number of ranks."
EXAMPLES = """Examples:

\b
  axonlaunch estimate strategy=fsdp
  axonlaunch estimate experiment=llama3_8b launch.nproc=64 hardware=h100_80gb
  axonlaunch estimate strategy=hybrid model=llama_debug launch.nproc=512 \\
      train.global_batch_size=512 --plot memory.svg
  axonlaunch estimate experiment=llama3_8b launch.nproc=64 --tokens 3T \\
      hardware=h100_80gb hardware.price_per_hour=2.5
"""


def command(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Trace every layer and micro-batch, without extrapolation."),
    ] = False,
    analytic: Annotated[
        bool,
        typer.Option(
            "--analytic",
            help="Count only parameters, gradients and optimizer states, without tracing a step.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Also save a plot as a .png or .svg file.",
            show_default=False,
        ),
    ] = None,
    tokens: TokenCount = None,
    as_json: Json = False,
) -> None:
    """Estimate peak memory per rank."""
    from axonlaunch.system.processes import forkserver

    count = _check_options(exact=exact, analytic=analytic, plot=plot, tokens=tokens)
    with forkserver.warm(preload=preloads(overrides)) as context:
        from axonlaunch.planning.estimate import forecast, load_for_estimate, with_changes

        with spinner("tracing a step"):
            config = load_for_estimate(
                context,
                overrides or [],
                config_name=config_name,
                config_dirs=config_dir or [],
            )
            estimate = forecast(context, config, exact=exact, analytic=analytic, tokens=count)
        if plot is not None:
            from axonlaunch.planning.reports.memory_plot import draw_memory

            save(draw_memory(estimate), plot)
        if as_json:
            print_json(estimate_to_json(with_changes(context, config, estimate)))
            return
        console = console_on()
        print_estimate(estimate, console)
        show_remedies(context, config, estimate, console)
        show_routing_changes(context, config, estimate, console)
    if plot is not None:
        console.print(f"\nplot          {plot}", markup=False, soft_wrap=True)


def _check_options(
    *, exact: bool, analytic: bool, plot: Path | None, tokens: str | None
) -> float | None:
    """Check all options, and return the number of tokens; None without this option.

    Raises:
        ConfigError: Options are invalid, or contradict each other.
    """
    from axonlaunch.config import ConfigError, ConfigIssue
    from axonlaunch.config.problems.errors import gathering

    problems, count = [], None
    if exact and analytic:
        message = "contradicts --exact, which traces every layer; use one of them"
        problems.append(ConfigIssue("--analytic", message))
    with gathering(problems):
        if plot is not None:
            check_plot(plot)
    with gathering(problems):
        count = check_tokens(tokens)
    if problems:
        raise ConfigError(problems)
    return count


def estimate_to_json(estimate: Forecast) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    return {
        "layout": estimate.layout,
        "workload": asdict(estimate.workload),
        **asdict(estimate.estimate),
        "fits": estimate.fits,
        "verdict": estimate.verdict,
        "margin": estimate.margin,
        "host_memory": None if estimate.host_memory is None else asdict(estimate.host_memory),
        "changes": [asdict(remedy) for remedy in estimate.changes],
        "untried": estimate.untried,
        "routings": [_routing_to_json(routed) for routed in estimate.routings],
        "training": None if estimate.training is None else asdict(estimate.training),
        "notes": estimate.notes,
    }


def _routing_to_json(routed: RoutingForecast) -> dict[str, Any]:
    return {
        "routing": routed.routing,
        "load": routed.load,
        "peak_bytes": routed.estimate.peak_bytes,
        "process_bytes": routed.estimate.process_bytes,
        "verdict": routed.verdict,
        "change": None if routed.change is None else asdict(routed.change),
    }


def print_estimate(estimate: Forecast, console: Console) -> None:
    """Print an estimate: the layout, a table, bars, and whether it fits."""
    from rich.text import Text

    from axonlaunch.planning.reports import memory_table
    from axonlaunch.system.text.formatting import quantity

    memory = estimate.estimate
    ranks = "1 rank" if memory.world_size == 1 else f"{memory.world_size:,} ranks"
    parameters = f"{estimate.workload.model} with {quantity(memory.parameters)} parameters"
    workload = f"{ranks}, {parameters}, {estimate.workload}"
    console.print(f"[bold]{estimate.layout}[/bold]: {workload}\n")
    for note in estimate.notes:
        console.print(Text.assemble(("note ", "yellow"), note, "\n"), soft_wrap=True)
    for table in memory_table.build_memory_tables(memory, width=console.width):
        console.print(table)
        console.print()
    bars = memory_table.bars(memory, memory_bytes=estimate.memory_bytes, width=console.width)
    console.print(bars, no_wrap=True)
    console.print()
    for label, text, style in memory_table.conclusions(estimate):
        print_labeled(label, text, console, style=style)
    if estimate.training is not None:
        console.print()
        print_training(estimate.training, console)
    if estimate.routings:
        console.print("\nexperts: the rank with the most tokens, in every layer")
        console.print(memory_table.build_routing_table(estimate))


def print_training(training: TrainingForecast, console: Console) -> None:
    """Print the predicted duration, goodput and cost of training."""
    from axonlaunch.planning.reports.training_table import training_lines

    for label, text in training_lines(training):
        print_labeled(label, text, console)


def print_labeled(label: str, text: str, console: Console, *, style: str = "") -> None:
    """Print a label and a text, wrapped to the width of the console."""
    from rich.text import Text

    lines = textwrap.wrap(text, console.width - _LABEL)
    for head, line in zip([label, *[""] * len(lines)], lines, strict=False):
        console.print(Text.assemble((f"{head:<{_LABEL}}", style), line))


def show_routing_changes(
    context: ForkServerContext, config: RunConfig, estimate: Forecast, console: Console
) -> None:
    """Print the cheapest change for each load of experts with which a run does not fit."""
    from axonlaunch.planning.estimate import with_routing_changes

    if estimate.fits is not True:
        return  # changes that make the run itself fit come first
    with spinner("searching for changes that make it fit"):
        routings = with_routing_changes(context, config, estimate)
    for routed in routings:
        if routed.change is not None:
            console.print(f"\n{routed.routing} routing fits with", end="")
            show_remedy(routed.change, console)
        elif routed.verdict != "fits":
            console.print(f"\nNone of the tried changes makes {routed.routing} routing fit.")


def show_remedies(
    context: ForkServerContext, config: RunConfig, estimate: Forecast, console: Console
) -> None:
    """Print each change that makes a run fit when it is found, then the search's outcome."""
    from axonlaunch.planning.estimate import suggest_changes

    search, count = suggest_changes(context, config, estimate), 0
    while True:
        try:
            with spinner("searching for changes that make it fit"):
                remedy = next(search)
        except StopIteration as end:
            ended: Searched = end.value
            break
        count += 1
        show_remedy(remedy, console)
    if estimate.fits is False and (text := _outcome(ended, count)):
        console.print()
        console.print(text, markup=False)


def show_remedy(remedy: Remedy, console: Console) -> None:
    """Print a change: its overrides, the peak memory of the highest rank, and its costs."""
    from rich.text import Text

    from axonlaunch.planning.reports import memory_table
    from axonlaunch.system.text.formatting import size

    console.print()
    console.print(Text(" ".join(remedy.overrides), style="bold"), soft_wrap=True)
    lines = [f"{size(remedy.process_bytes)} per rank", *remedy.costs]
    if remedy.host_memory is not None:
        lines.append(f"host memory: {memory_table.host_memory_text(remedy.host_memory)}")
    for line in lines:
        filled = textwrap.fill(line, console.width - 2)
        console.print(textwrap.indent(filled, "  "), markup=False)


def _outcome(ended: Searched, count: int) -> str:
    """Describe the outcome of a search; empty if all changes were tried and some fit."""
    if ended.reason:
        from axonlaunch.planning.estimate import NOT_SEARCHED

        return NOT_SEARCHED + ended.reason
    if ended.untried:
        untried, more = len(ended.untried), "more " if count else ""
        changes = f"{more}change" if untried == 1 else f"{more}changes"
        stopped = f"the search stopped after {ended.seconds:.0f} s without trying them"
        return f"{untried} {changes} may fit: {stopped}. The first is {ended.untried[0]}"
    return "" if count else "None of the tried changes makes it fit; use more ranks."
