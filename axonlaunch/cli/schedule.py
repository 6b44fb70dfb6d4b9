"""``axonlaunch schedule``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from axonlaunch.cli.options import ConfigDir, ConfigName, Json, Overrides, print_json
from axonlaunch.cli.plotting import check_plot, save
from axonlaunch.launch.output.spinner import spinner

HELP = "Draw the pipeline schedule: what each rank computes when, and where it idles."
EXAMPLES = """Examples:

\b
  axonlaunch schedule strategy=pipeline
  axonlaunch schedule strategy=pipeline strategy.pipeline.degree=4 strategy.pipeline.schedule=gpipe
  axonlaunch schedule strategy=pipeline strategy.pipeline.degree=4 \\
      strategy.pipeline.schedule=zbv_zero_bubble --plot bubble.svg
  axonlaunch schedule strategy=pipeline model=llama3_8b --memory
"""


def command(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Also save a plot, .png or .svg.", show_default=False),
    ] = None,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Also estimate the activation memory of each stage."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Draw the pipeline schedule."""
    from axonlaunch import config as configuration
    from axonlaunch.config import ConfigError, ConfigIssue, with_values
    from axonlaunch.config.layout import Layout, num_ranks, resolved
    from axonlaunch.config.rules import broken_world_rules

    config = configuration.load(
        overrides or [], config_name=config_name, config_dirs=config_dir or []
    )
    if config.strategy.pipeline.degree == 1:
        message = "there is no schedule to show; use strategy=pipeline or a degree of 2 or more"
        raise ConfigError([ConfigIssue("strategy.pipeline.degree", message, 1)])
    # No accelerators: as many ranks as the degrees need, whatever machine this is.
    config = resolved(config, accelerators=0)
    if problems := broken_world_rules(config, world_size=num_ranks(config)):
        raise ConfigError(problems)
    layout = Layout.of(config, world_size=num_ranks(config))

    if plot is not None:
        check_plot(plot)
    from axonlaunch.engines.pipeline import timeline_plot
    from axonlaunch.engines.pipeline.schedule import PipelineSchedule
    from axonlaunch.engines.pipeline.timeline import PipelineMemoryStats, timeline

    schedule = PipelineSchedule(
        layout.schedule,
        degree=layout.pipeline,
        microbatches=layout.round_microbatches,
        stages_per_rank=layout.stages_per_rank,
    )
    # By rank, not by stage, so that schedules with different numbers of stages can be compared.
    times = timeline(
        schedule, forward=1 / schedule.stages_per_rank, backward=2 / schedule.stages_per_rank
    )
    stats = PipelineMemoryStats.from_schedule(schedule)
    if memory:
        from axonlaunch.planning.estimate import estimated
        from axonlaunch.planning.memory.engine_stats import pipeline_stats
        from axonlaunch.system import forkserver

        with forkserver.warm() as context, spinner("tracing a step"):
            found = estimated(context, with_values(config, {"hardware": None}))
        stats = pipeline_stats(found, schedule)
    if plot is not None:
        save(timeline_plot.draw_timeline(times), plot)
    if as_json:
        print_json(
            {
                "schedule": schedule.name,
                "degree": schedule.degree,
                "stages_per_rank": schedule.stages_per_rank,
                "microbatches": schedule.microbatches,
                "rounds": layout.rounds,
                "bubble_fraction": stats.bubble_fraction,
                "span": times.span,
                "live_activations": list(stats.live_activations),
                "activation_bytes": stats.activation_bytes,
                "ranks": [
                    {
                        "rank": rank,
                        "stages": list(schedule.stages_of(rank)),
                        "actions": [str(action) for action in row],
                    }
                    for rank, row in enumerate(schedule.actions)
                ],
                "plot": None if plot is None else str(plot),
            }
        )
        return
    from rich.console import Console

    from axonlaunch.engines.pipeline.timeline_text import text_stats, text_timeline

    console = Console(highlight=False)
    stages = f" of {schedule.stages_per_rank} stages" if schedule.stages_per_rank > 1 else ""
    rounds = f", {layout.rounds} rounds per step" if layout.rounds > 1 else ""
    console.print(
        f"[bold]{schedule.name}[/bold]: {schedule.degree} ranks{stages}, "
        f"{schedule.microbatches} micro-batches{rounds}\n"
    )
    console.print(text_timeline(times, width=console.width), no_wrap=True)
    console.print(text_stats(stats, width=console.width), markup=False)
    if stats.activation_bytes is not None:
        from axonlaunch.system.formatting import size

        held = " ".join(f"{n}:{size(held)}" for n, held in enumerate(stats.activation_bytes))
        console.print(f"in bytes     {held}", markup=False)
    if plot is not None:
        console.print(f"plot         {plot}", markup=False, soft_wrap=True)
