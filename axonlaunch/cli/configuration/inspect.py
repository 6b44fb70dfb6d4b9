"""``axonlaunch inspect``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from axonlaunch.cli.shared.options import ConfigDir, ConfigName, Json, print_json
from axonlaunch.launch.local.preload_rules import preloads
from axonlaunch.system.text.spinner import spinner
from axonlaunch.system.text.terminal import console_on

if TYPE_CHECKING:
    from rich.console import Console

    from axonlaunch.preflight.inspection import InspectedExperts, Inspection

HELP = "Show a model's blocks and valid layouts. Tied weights and the tensor plan, too."
EXAMPLES = """Examples:

\b
  axonlaunch inspect ./Qwen3-0.6B
  axonlaunch inspect model=llama_debug
  axonlaunch inspect model=hf model.init=random \\
      'model.config={model_type: gpt2, n_layer: 4}'
"""
SHOWN = 12


def command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH|KEY=VALUE...",
            help="Folder or id of a Hugging Face model, or settings: group=option or key=value.",
        ),
    ] = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    as_json: Json = False,
) -> None:
    """Show a model's blocks, tied weights, tensor plan and valid layouts."""
    from axonlaunch import config as configuration
    from axonlaunch.system.processes import forked_call, forkserver

    chosen = overrides(arguments or [])
    with forkserver.warm(preload=preloads(chosen)) as context, spinner("building"):
        config = configuration.load(
            chosen,
            config_name=config_name,
            config_dirs=config_dir or [],
        )
        inspection: Inspection = forked_call.call(
            context,
            "axonlaunch.preflight.inspection:inspect",
            config,
            task="building the model",
        )
    if as_json:
        print_json(asdict(inspection))
    else:
        _show(inspection, console_on())


def overrides(arguments: list[str]) -> list[str]:
    """Return arguments as overrides; a path as the first argument selects the model in it."""
    if arguments and ("=" not in arguments[0] or Path(arguments[0]).is_dir()):
        path, *others = arguments
        quoted = path.replace("\\", "\\\\").replace("'", "\\'")
        return ["model=hf", f"model.path='{quoted}'", "model.init=random", *others]
    return arguments


def _show(inspection: Inspection, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    blocks = ", ".join(f"{count} x {kind}" for kind, count in inspection.blocks.items())
    cuts = inspection.cut_points
    rows = {
        "model": f"{inspection.model}, {inspection.parameters:,} parameters",
        "blocks": f"{blocks} in {inspection.layers}" if blocks else "none",
        "split points": f"{len(cuts)}: before {cuts[0]} ... {cuts[-1]}" if cuts else "none",
        "first stage": ", ".join(inspection.first) or "unknown",
        "last stage": ", ".join(inspection.last) or "unknown",
        "ties": ", ".join(f"{other} = {name}" for other, name in inspection.ties.items()) or "none",
    }
    for name, text in rows.items():
        table.add_row(name, escape(text))
    plan = [f"{pattern}: {style}" for pattern, style in inspection.tensor_plan.items()]
    for number, line in enumerate(plan[:SHOWN] or ["none"]):
        table.add_row("" if number else "tensor plan", escape(line))
    if len(plan) > SHOWN:
        table.add_row("", f"{len(plan) - SHOWN} more; use --json to list all")
    for number, experts in enumerate(inspection.experts):
        table.add_row("" if number else "experts", escape(_experts_line(experts)))
    for number, layout in enumerate(inspection.layouts):
        answer = "yes" if layout.legal else f"no: {layout.reason}"
        table.add_row("" if number else "layouts", escape(f"{layout.layout}: {answer}"))
    for note in inspection.notes:
        table.add_row("note", escape(note))
    console.print(table)


def _experts_line(experts: InspectedExperts) -> str:
    parts = [f"{experts.count} x {experts.num_experts} in {experts.modules}"]
    parts += [f"router {experts.router}"] if experts.router else []
    parts += [f"shared {name}" for name in experts.shared]
    return "; ".join(parts)
