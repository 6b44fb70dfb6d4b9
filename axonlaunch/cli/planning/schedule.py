"""``axonlaunch schedule``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axonlaunch.cli.shared.options import ConfigDir, ConfigName, Json, Overrides, print_json
from axonlaunch.cli.shared.plotting import check_plot, save
from axonlaunch.system.text.spinner import spinner
from axonlaunch.system.text.terminal import console_on

if TYPE_CHECKING:
    from axonlaunch.config import RunConfig
    from axonlaunch.config.consistency.layout import Layout
    from axonlaunch.engines.pipeline.schedule import PipelineSchedule
    from axonlaunch.engines.pipeline.timeline import PipelineMemoryStats, Timeline

HELP = "Draw a pipeline schedule. It shows when each rank computes and when it idles."
EXAMPLES = """Examples:

\b
  axonlaunch schedule strategy=pipeline
  axonlaunch schedule strategy=pipeline strategy.pipeline.degree=4 \\
      strategy.pipeline.schedule=gpipe
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
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Also save a plot as a .png or .svg file.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Also estimate the activation memory of each stage."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Draw the pipeline schedule."""
    from axonlaunch.config.consistency.layout import Layout, num_ranks

    config = _load_pipeline(overrides or [], config_name, config_dir or [])
    layout = Layout.of(config, world_size=num_ranks(config))
    if plot is not None:
        check_plot(plot)
    from axonlaunch.engines.pipeline.schedule import PipelineSchedule
    from axonlaunch.engines.pipeline.timeline import PipelineMemoryStats, timeline

    schedule = PipelineSchedule.of(layout)
    # A rank's time does not depend on its number of stages, so that schedules can be compared.
    times = timeline(
        schedule, forward=1 / schedule.stages_per_rank, backward=2 / schedule.stages_per_rank
    )
    stats = (
        _trace_memory(config, schedule) if memory else PipelineMemoryStats.from_schedule(schedule)
    )
    if plot is not None:
        from axonlaunch.engines.pipeline.timeline_plot import draw_timeline

        save(draw_timeline(times), plot)
    if as_json:
        print_json(_to_json(schedule, layout, times, stats, plot))
    else:
        _show(schedule, layout, times, stats, plot)


def _load_pipeline(overrides: list[str], config_name: str, config_dirs: list[Path]) -> RunConfig:
    """Return the configuration of a pipeline, with the number of ranks that its degrees need.

    Accelerators are not counted, because the schedule does not depend on this node.

    Raises:
        ConfigError: The configuration is invalid or has no pipeline.
    """
    from axonlaunch import config as configuration
    from axonlaunch.config import ConfigError, ConfigIssue
    from axonlaunch.config.consistency.layout import num_ranks, resolved
    from axonlaunch.config.consistency.rules import broken_world_rules
    from axonlaunch.config.consistency.run_precision import with_precision

    config = configuration.load(overrides, config_name=config_name, config_dirs=config_dirs)
    if config.strategy.pipeline.degree == 1:
        message = "has no schedule; use strategy=pipeline or a degree of 2 or more"
        raise ConfigError([ConfigIssue("strategy.pipeline.degree", message, 1)])
    config = with_precision(resolved(config, accelerators=0))
    if problems := broken_world_rules(config, world_size=num_ranks(config)):
        raise ConfigError(problems)
    return config


def _trace_memory(config: RunConfig, schedule: PipelineSchedule) -> PipelineMemoryStats:
    """Return a schedule's statistics, with the bytes of activations from a traced step."""
    from axonlaunch.config import with_values
    from axonlaunch.planning.estimate import cached_estimate
    from axonlaunch.planning.memory.pipeline_stats import pipeline_stats
    from axonlaunch.system.processes import forkserver

    with forkserver.warm() as context, spinner("tracing a step"):
        estimate = cached_estimate(context, with_values(config, {"hardware": None}))
    return pipeline_stats(estimate, schedule)


def _to_json(
    schedule: PipelineSchedule,
    layout: Layout,
    times: Timeline,
    stats: PipelineMemoryStats,
    plot: Path | None,
) -> dict[str, Any]:
    return {
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


def _show(
    schedule: PipelineSchedule,
    layout: Layout,
    times: Timeline,
    stats: PipelineMemoryStats,
    plot: Path | None,
) -> None:
    from axonlaunch.engines.pipeline.timeline_text import text_stats, text_timeline
    from axonlaunch.system.text.formatting import size

    console = console_on()
    stages = f" of {schedule.stages_per_rank} stages" if schedule.stages_per_rank > 1 else ""
    rounds = f", {layout.rounds} rounds per step" if layout.rounds > 1 else ""
    console.print(
        f"[bold]{schedule.name}[/bold]: {schedule.degree} ranks{stages}, "
        f"{schedule.microbatches} micro-batches{rounds}\n"
    )
    console.print(text_timeline(times, width=console.width), no_wrap=True)
    console.print(text_stats(stats, width=console.width), markup=False)
    if stats.activation_bytes is not None:
        by_stage = " ".join(f"{n}:{size(num)}" for n, num in enumerate(stats.activation_bytes))
        console.print(f"in bytes     {by_stage}", markup=False)
    if plot is not None:
        console.print(f"plot         {plot}", markup=False, soft_wrap=True)
