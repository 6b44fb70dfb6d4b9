"""``axonlaunch plan``."""

from __future__ import annotations

import textwrap
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axonlaunch.cli.planning.estimate import print_training
from axonlaunch.cli.shared.options import (
    ConfigDir,
    ConfigName,
    Json,
    Overrides,
    TokenCount,
    check_tokens,
    print_json,
    words_of,
)
from axonlaunch.cli.shared.output_files import option_file_problem, writing
from axonlaunch.launch.local.preload_rules import preloads
from axonlaunch.system.text.spinner import spinner
from axonlaunch.system.text.terminal import console_on

if TYPE_CHECKING:
    from rich.console import Console

    from axonlaunch.planning.records import Plan

HELP = "Find the fastest layouts that fit a number of devices. Needs no GPU and no data."
EXAMPLES = """Examples:

\b
  axonlaunch plan --devices 64 model=llama3_70b hardware=h100_80gb \\
      data=synthetic_tokens data.sequence_length=8192 \\
      train.global_batch_size=128 train.precision=bf16
  axonlaunch plan --devices 8 experiment=llama3_8b hardware=a100_80gb \\
      strategy.tensor.degree=2 --write experiment/planned.yaml
  axonlaunch plan --devices 64 --tokens 3T experiment=llama3_8b \\
      hardware=h100_80gb
"""


def command(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            metavar="N",
            help="Number of devices, with one rank each.",
            show_default=False,
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="FILE",
            help="Write the fastest layout to a configuration file, experiment/NAME.yaml.",
            show_default=False,
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="WORD",
            help=(
                "low_precision: also search 16-bit weights with fp32 masters, 8-bit optimizer "
                "states and fp8 products, which change the numerics of a run."
            ),
            autocompletion=words_of("low_precision"),
            show_default=False,
        ),
    ] = None,
    tokens: TokenCount = None,
    as_json: Json = False,
) -> None:
    """Find the fastest layouts that fit."""
    from axonlaunch.planning.plan import experiment, plan_run
    from axonlaunch.system.processes import forkserver
    from axonlaunch.system.storage.files import replace_text

    count, target = _check_options(devices, write, allow or [], tokens, overrides or [])
    written = partial(
        experiment, overrides or [], config_name=config_name, config_dirs=config_dir or []
    )
    if write is not None:
        written()  # raises an error before the search if overrides can't be written to a file
        with writing("--write", write):
            write.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with forkserver.warm(preload=preloads(overrides)) as context, spinner("searching layouts"):
        plan = plan_run(
            context,
            overrides or [],
            devices=count,
            config_name=config_name,
            config_dirs=config_dir or [],
            tokens=target,
            allow=allow or [],
        )
    seconds = time.monotonic() - began
    if write is not None:
        with writing("--write", write):
            best = plan.candidates[0]
            replace_text(write, written(best.overrides, numerics=best.numerics))
    if as_json:
        print_json(plan_to_json(plan, seconds))
        return
    console = console_on()
    print_plan(plan, console, seconds=seconds)
    if write is not None:
        changes = ", ".join(plan.candidates[0].numerics)
        note = f", which changes the numerics of the run: {changes}" if changes else ""
        console.print(f"\nwritten to {write}{note}", markup=False, soft_wrap=True)
        trains = _training_command(write, config_dir or [], config_name)
        console.print(trains, markup=False, soft_wrap=True)


def _training_command(written: Path, config_dirs: list[Path], config_name: str) -> str:
    """Return the command that trains with a written option of the group ``experiment``."""
    folders = dict.fromkeys([written.parent.parent, *config_dirs])
    options = [f"--config-dir {folder}" for folder in folders]
    options += [f"--config-name {config_name}"] if config_name != "config" else []
    return f"axonlaunch train {' '.join(options)} experiment={written.stem}"


def plan_to_json(plan: Plan, seconds: float) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    candidates = [{**asdict(planned), "fits": planned.fits} for planned in plan.candidates]
    return {
        "workload": asdict(plan.workload),
        "searched": plan.searched,
        "untraced": plan.untraced,
        "nodes": asdict(plan.nodes),
        "assumed": plan.assumed,
        "typical": plan.typical,
        "imbalance": plan.imbalance,
        "compiled": None if plan.compiled is None else asdict(plan.compiled),
        "not_tried": plan.not_tried,
        "seconds": round(seconds, 1),
        "candidates": candidates,
    }


def print_plan(plan: Plan, console: Console, *, seconds: float) -> None:
    """Print a table of layouts, their overrides, and why others are slower than the first."""
    from rich.text import Text

    from axonlaunch.planning.reports import plan_table

    console.print(f"[bold]{plan.workload.model}[/bold]: {plan.workload}")
    console.print(
        f"{plan.searched:,} layouts searched in {seconds:.0f} s; the best that fit come first\n"
    )
    for note in plan_table.notes(plan):
        console.print(Text.assemble(("note ", "yellow"), note, "\n"), soft_wrap=True)
    console.print(plan_table.build_plan_table(plan))
    if compiled := plan_table.compile_note(plan):
        console.print(Text.assemble(("\nnote ", "yellow"), compiled), soft_wrap=True)
    for number, planned in enumerate(plan.candidates, 1):
        console.print()
        console.print(Text(f"{number}  " + " ".join(planned.overrides)), soft_wrap=True)
        if number == 1:
            remark = plan_table.time_shares(planned)
        else:
            remark = plan_table.why_slower(plan.candidates[0], planned)
        if remark:
            lines = textwrap.fill(remark, console.width - 3)
            console.print(textwrap.indent(lines, "   "), markup=False)
    if plan.candidates[0].training is not None:
        console.print("\nwith layout 1")
        print_training(plan.candidates[0].training, console)


def _check_options(
    devices: int | None,
    write: Path | None,
    allow: list[str],
    tokens: str | None,
    overrides: list[str],
) -> tuple[int, float | None]:
    """Check all options before the search, and return the numbers of devices and of tokens.

    Raises:
        ConfigError: The number of devices is missing, the file can't be used, or another option is
            invalid.
    """
    from axonlaunch.config import ConfigError, ConfigIssue
    from axonlaunch.config.problems.errors import gathering
    from axonlaunch.planning.plan import allowed_keys

    problems, target = [], None
    if devices is None or devices < 1:
        value = ... if devices is None else devices
        problems.append(
            ConfigIssue("--devices", "must be the number of devices to plan for, 1 or more", value)
        )
    reason = "" if write is None else option_file_problem(write, "experiment")
    if write is not None and not reason and f"experiment={write.stem}" in overrides:
        reason = f"would include itself, because of experiment={write.stem}; give another name"
    if reason:
        problems.append(ConfigIssue("--write", reason, str(write)))
    with gathering(problems):
        allowed_keys(allow)
    with gathering(problems):
        target = check_tokens(tokens)
    if problems:
        raise ConfigError(problems)
    assert devices is not None
    return devices, target
