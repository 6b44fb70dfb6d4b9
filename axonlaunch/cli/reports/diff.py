"""``axonlaunch diff``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axonlaunch.cli.shared.options import Json, print_json, refuse
from axonlaunch.system.storage.files import why_no_folder
from axonlaunch.system.text.terminal import console_on

if TYPE_CHECKING:
    from rich.console import Console

    from axonlaunch.diagnostics.module_trace.difference import TraceComparison, TracedDifference
    from axonlaunch.diagnostics.module_trace.element_comparison import ElementsOfStep
    from axonlaunch.diagnostics.module_trace.files import StepTrace

HELP = (
    "Show the first tensor that differs between two traced runs. "
    "Exit status 0: same, 1: different, 2: not comparable."
)
EXAMPLES = """Examples:

\b
  axonlaunch train 'train.trace.steps=[0,100]' strategy=ddp name=a
  axonlaunch train 'train.trace.steps=[0,100]' strategy=hybrid name=b
  axonlaunch diff runs/a runs/b
"""
_SHOWN = 8
"""Number of differences, names and settings that are printed; --json lists all."""


def command(
    run_a: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_A", help="Run traced with train.trace.steps, or folder of ax.trace."
        ),
    ],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another run of the same model.")],
    as_json: Json = False,
) -> None:
    """Compare the tensors that the modules of two runs computed."""
    from axonlaunch.diagnostics.module_trace.difference import (
        TracesIncomparableError,
        TraceTolerance,
        compare_traces,
    )
    from axonlaunch.verification.result import GRADIENT_FLOOR, PARAMETER_FLOOR

    folders = (run_a, run_b)
    tolerance = TraceTolerance(gradient_floor=GRADIENT_FLOOR, parameter_floor=PARAMETER_FLOOR)
    traces, elements = _read(folders)
    try:
        comparison = compare_traces(*traces, tolerance=tolerance, elements=elements)
    except TracesIncomparableError as error:
        refuse(f"{run_a} and {run_b}: {error}")
    report = _Report(folders, traces, comparison, _changed_settings(folders))
    if as_json:
        print_json(report.as_json())
    else:
        report.show()
    raise typer.Exit(1 if comparison.differences else 0)


def _read(
    folders: tuple[Path, Path],
) -> tuple[tuple[dict[int, StepTrace], dict[int, StepTrace]], dict[int, ElementsOfStep]]:
    """Read the traced steps of both runs; open their elements if both runs wrote them.

    Raises:
        ConfigError: A folder contains no readable trace; lists all such folders.
    """
    from axonlaunch.config import ConfigError, ConfigIssue, suggest_run_folder
    from axonlaunch.diagnostics.module_trace.element_comparison import elements_of_steps
    from axonlaunch.diagnostics.module_trace.files import (
        UnreadableModuleTraceError,
        read_step,
        traced_steps,
    )

    traces: list[dict[int, StepTrace]] = []
    problems = []
    for folder in folders:
        paths = traced_steps(folder)
        if not folder.is_dir():
            message = f"{folder}: {why_no_folder(folder)}{suggest_run_folder(folder)}"
            problems.append(ConfigIssue("", message))
        elif not paths:
            message = f"{folder}: no step was traced; train with train.trace.steps=[0]"
            problems.append(ConfigIssue("", message))
        try:
            traces.append({step: read_step(path) for step, path in paths.items()})
        except UnreadableModuleTraceError as error:
            problems.append(ConfigIssue("", str(error)))
    elements: dict[int, ElementsOfStep] = {}
    try:
        elements = elements_of_steps(*map(traced_steps, folders))
    except UnreadableModuleTraceError as error:
        problems.append(ConfigIssue("", str(error)))
    if problems:
        raise ConfigError(problems)
    return (traces[0], traces[1]), elements


def _changed_settings(folders: tuple[Path, Path]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ; empty if a folder is not a run of this package."""
    from axonlaunch.diagnostics.report.comparison import changed_settings
    from axonlaunch.diagnostics.report.record.run_record import NotARunError, read_run

    try:
        return changed_settings([read_run(folder) for folder in folders])
    except NotARunError:
        return []


@dataclass(frozen=True)
class _Report:
    """The result of a comparison, as text or JSON.

    Attributes:
        folders: Folders of the two runs.
        traces: Traced steps of each run.
        comparison: Differences between the traces.
        settings: Settings that differ, each with both values.
    """

    folders: tuple[Path, Path]
    traces: tuple[Mapping[int, StepTrace], Mapping[int, StepTrace]]
    comparison: TraceComparison
    settings: list[tuple[str, list[str]]]

    def as_json(self) -> dict[str, Any]:
        differences = [
            {
                "step": difference.step,
                "module": difference.module,
                "kind": difference.first_tensor.kind,
                "name": difference.first_tensor.name,
                "relative": difference.relative if math.isfinite(difference.relative) else None,
                "ratio": difference.ratio,
                "rms": [difference.first_tensor.rms, difference.second_tensor.rms],
                "elements": _elements(difference),
                "what": self._describe(difference),
                "likely_cause": self._cause(difference) or None,
            }
            for difference in self.comparison.differences
        ]
        return {
            "same": not differences,
            "runs": [str(folder) for folder in self.folders],
            "configuration": dict(self.settings),
            "tolerances": {str(step): passing for step, passing in self.comparison.steps.items()},
            "compared": self.comparison.compared,
            "compared_by_element": self.comparison.by_element,
            "first_difference": differences[0] if differences else None,
            "differences": differences,
            "only": list(self.comparison.only),
        }

    def show(self) -> None:
        console = console_on()
        step = next(iter(self.comparison.steps))
        for folder, side in zip(self.folders, self.traces, strict=True):
            layout = f"{side[step].layout}, {side[step].arithmetic}"
            _line(console, f"{folder}: {layout}, steps {', '.join(map(str, side))}")
        if self.settings:
            self._show_settings(console)
        for folder, names in zip(self.folders, self.comparison.only, strict=True):
            if names:
                more = ", ..." if len(names) > _SHOWN else ""
                _line(console, f"only in {folder}: {', '.join(names[:_SHOWN])}{more}")
        passing = ", ".join(
            f"{most:.1e} at step {number}" for number, most in self.comparison.steps.items()
        )
        by_element = self.comparison.by_element
        elements = f" ({by_element} element by element)" if by_element else ""
        compared = f"{self.comparison.compared} tensors compared{elements}"
        _line(console, f"{compared}; tolerance: {passing}")
        if self.comparison.differences:
            self._show_differences(console)
        else:
            console.print("[green]no differences[/green]")

    def _show_settings(self, console: Console) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in ("configuration", *(folder.name for folder in self.folders)):
            table.add_column(Text(title), overflow="fold")
        for key, values in self.settings[:_SHOWN]:
            table.add_row(Text(key), *(Text(value) for value in values))
        console.print(table)
        if len(self.settings) > _SHOWN:
            more = len(self.settings) - _SHOWN
            _line(console, f"and {more} more; axonlaunch compare lists all")

    def _show_differences(self, console: Console) -> None:
        from axonlaunch.diagnostics.module_trace.difference import last_same

        differences = self.comparison.differences
        first, *_ = differences
        parts = [self._name_of(first), self._cause(first)]
        if same := last_same(first, self.traces[0][first.step]):
            parts.append(f"while the gradient of {same}'s output is the same")
        console.print(f"[red]first difference[/red] at step {first.step}: ", end="", soft_wrap=True)
        _line(console, ", ".join(filter(None, parts)))
        later = [difference for difference in differences[1:] if difference.step == first.step]
        if later:
            tensors = "1 more tensor differs" if len(later) == 1 else f"{len(later)} more differ"
            _line(console, f"{tensors} later in this step")
        for difference in later[:_SHOWN]:
            _line(console, f"  {self._name_of(difference)}")

    def _name_of(self, difference: TracedDifference) -> str:
        return (
            f"{difference.module}: {self._describe(difference)}"
            if difference.module
            else self._describe(difference)
        )

    def _describe(self, difference: TracedDifference) -> str:
        from axonlaunch.diagnostics.module_trace.difference import describe_difference

        return describe_difference(difference, self._names)

    def _cause(self, difference: TracedDifference) -> str:
        from axonlaunch.diagnostics.module_trace.difference import likely_cause

        return likely_cause(
            difference,
            self._names,
            [side[difference.step] for side in self.traces],
            steps=[*self.comparison.steps],
        )

    @property
    def _names(self) -> tuple[str, str]:
        return str(self.folders[0]), str(self.folders[1])


def _elements(difference: TracedDifference) -> dict[str, Any] | None:
    """Return the first element that differs and their number; None if it is unknown."""
    elements = difference.elements
    if elements is None or elements.index is None:
        return None
    values = [value if math.isfinite(value) else None for value in elements.values]
    return {
        "first": [*elements.index],
        "values": values,
        "different": elements.count,
        "total": elements.total,
    }


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
