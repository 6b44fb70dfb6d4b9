"""Shows the events of a run in a terminal, or as plain lines if there is no terminal."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.status import Status
from rich.table import Column
from rich.text import Text

from axonlaunch.config.values.url import shortened
from axonlaunch.diagnostics.failure_text import failure_place, fold_ranks
from axonlaunch.events import (
    Evaluated,
    Event,
    Finished,
    Noted,
    Saved,
    Started,
    StepDone,
    StepLogged,
    Straggler,
    perplexity_of,
)
from axonlaunch.launch.failures.report import Crash
from axonlaunch.system.frame_origin import frame_owner
from axonlaunch.system.text.formatting import quantity, size
from axonlaunch.system.text.streams import refusal
from axonlaunch.system.text.terminal import console_on

SLOW = 0.2
"""Fraction of a step that other ranks must wait for a slow rank before it is reported."""
_PERSISTENT = 4
"""Consecutive logged steps in which the same rank must be slow before it is reported. Short work of
the operating system can slow any rank down for a moment."""
_WIDE = 110
"""Columns of a terminal whose progress bar has room for all figures of memory."""
_NARROW = 60
"""Columns of a terminal whose progress bar has room for the loss only."""
_FEW_STEPS = 10
"""Largest number of steps of a run that leaves a line of each step on a terminal too."""
_SHOWN = 16
"""Number of traceback lines to show, counted from the end; the log contains all lines."""
_FRAME = re.compile(r'  File "(?P<file>[^"]*)"')


class RunConsole:
    """Shows one run."""

    def __init__(self, *, stream: TextIO | None = None, is_plain: bool = False) -> None:
        """Prepare to show a run; nothing is printed yet.

        Args:
            stream: Output stream; None selects standard output.
            is_plain: Whether to print plain lines even on a terminal, for example because it
                belongs to a launcher.
        """
        self._console = console_on(
            stream or sys.stdout, soft_wrap=False, force_terminal=False if is_plain else None
        )
        self._progress: Progress | None = None
        self._status: Status | None = None
        self._counted, self._of_process = "tok", ""
        self._suspect: int | None = None
        self._slow_for = 0
        self._reported: int | None = None
        self._task: TaskID | None = None
        self._has_few_steps = False

    @property
    def refusal(self) -> str | None:
        """Reason why some output could not be written; None if all was written."""
        return refusal(cast("TextIO", self._console.file))

    def __call__(self, event: Event) -> None:
        """Show an event."""
        match event:
            case Started():
                self._start(event)
            case StepLogged():
                self._step(event)
            case StepDone():
                self._advance(event.step)
            case Evaluated():
                self._show_evaluation(event)
            case Saved():
                path = shortened(event.path)
                overlapped = event.stalled_s < 0.9 * event.seconds
                stall = f", of which training waited {event.stalled_s:.1f} s" if overlapped else ""
                self.line(f"[dim]saved {escape(path)} in {event.seconds:.1f} s{stall}[/dim]")
            case Noted():
                self._note(event.text)
            case Finished():
                self.stop()

    def wait(self, doing: str) -> None:
        """Show a spinner with a text until other output follows."""
        self.stop()
        if self._console.is_terminal:
            self._status = self._console.status(doing)
            self._status.start()

    def line(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(text)

    def log(self, text: str) -> None:
        """Print a line without markup and without wrapping it."""
        self._console.print(Text(text), soft_wrap=True)

    def stop(self) -> None:
        """Remove the spinner and the progress bar."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def summary(self, rows: list[tuple[str, str]]) -> None:
        """Print the run's figures, one per line."""
        self.stop()
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self._console.print(f"[dim]{name:<{width}}[/dim]  {escape(value)}", soft_wrap=True)

    def _start(self, event: Started) -> None:
        self.stop()
        self._counted = "tok" if event.counted == "tokens" else event.counted
        self._of_process = " RSS" if event.device == "cpu" else ""
        samples = "a stream" if event.samples is None else f"{quantity(event.samples)} samples"
        self.line(
            f"[bold]{event.layout}[/bold] on {event.device}: "
            f"{quantity(event.parameters)} parameters, {samples}, "
            f"steps {event.step} to {event.steps}"
        )
        self.line(f"[dim]run folder {escape(shortened(event.run_dir))}[/dim]")
        for text in event.corrupt:
            self.line(f"[bold red]corrupt[/bold red] {escape(text.replace(f'{Path.cwd()}/', ''))}")
        if event.resumed_from:
            self.line(f"resumed from {escape(shortened(event.resumed_from))}")
        for note in event.notes:
            self._note(note)
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, complete_style="cyan"),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            expand=True,
        )
        self._task = self._progress.add_task(
            "", total=event.steps, completed=event.step, numbers=""
        )
        self._progress.start()
        self._has_few_steps = event.steps - event.step <= _FEW_STEPS

    def _note(self, text: str) -> None:
        self.line(f"[yellow]note[/yellow] {escape(text)}")

    def _step(self, event: StepLogged) -> None:
        speed = f"{quantity(event.tokens_per_s)} {self._counted}/s"
        memory = peak = f"{size(event.peak_memory_bytes)}{self._of_process}"
        if event.mfu is not None:
            speed += f"  {event.mfu:.1%} MFU"
        if event.reserved_bytes is not None:
            memory += f" of {size(event.reserved_bytes)} reserved"
        if event.alloc_retries:
            memory += f", {event.alloc_retries} retries"
        if self._progress is not None and self._task is not None:
            shown = memory if self._console.width >= _WIDE else peak
            numbers = f"loss {event.loss:.3f}"
            numbers += f"  {speed}  {shown}" if self._console.width >= _NARROW else ""
            self._progress.update(self._task, completed=event.step, numbers=numbers)
        if not self._console.is_terminal or self._has_few_steps:
            parts = [f"step {event.step}", f"loss {event.loss:.4f}", speed, memory]
            if event.expert_load is not None:
                parts.append(f"expert load {event.expert_load:.2f}")
            if event.skipped:
                parts.append(f"updates skipped: {event.skipped} (loss scale {event.loss_scale:g})")
            self.log("  ".join([*parts, *_gpu_readings(event)]))
        self._straggler(event.slowest)

    def _straggler(self, slowest: Straggler | None) -> None:
        """Report a rank that stays slow, once until another rank is slow."""
        if slowest is None:
            return
        slow = slowest.rank if slowest.cost >= SLOW else None
        self._slow_for = self._slow_for + 1 if slow == self._suspect else 1
        self._suspect = slow
        if slow is None or slow == self._reported or self._slow_for < _PERSISTENT:
            return
        self._reported = slow
        self.line(
            f"[yellow]note[/yellow] rank {slow} on {escape(slowest.host)} is slow: the other "
            f"ranks wait {slowest.cost:.0%} of each step for it. It spends {slowest.compute:.0%} "
            f"of its time computing and {slowest.data:.0%} waiting for data."
        )

    def _advance(self, step: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step)

    def _show_evaluation(self, event: Evaluated) -> None:
        versus = ""
        if event.unigram_entropy is not None:
            versus = f" [dim](byte-unigram entropy {event.unigram_entropy:.3f})[/dim]"
        elif event.perplexity is not None:
            of_each = [f"{name} {perplexity_of(loss):.4g}" for name, loss in event.sources.items()]
            shown = ", ".join([f"perplexity {event.perplexity:.4g}", *of_each])
            versus = f" [dim]({escape(shown)})[/dim]"
        metrics = [f"  {name} [bold]{value:.4g}[/bold]" for name, value in event.metrics.items()]
        loss = f"evaluation loss [bold]{event.eval_loss:.3f}[/bold]"
        self.line(f"step {event.step}  {loss}{''.join(metrics)}{versus}")


def _gpu_readings(event: StepLogged) -> list[str]:
    """Return the GPU readings of a log line. A progress bar has no room for them."""
    if event.active_bytes is None:
        return []
    readings = (
        (event.power_w, "{:.0f} W"),
        (event.utilization, "{:.0%} busy"),
        (event.temperature_c, "{:.0f} C"),
        (event.data_wait_s / event.step_s, "{:.0%} waiting for data"),
    )
    texts = [text.format(value) for value, text in readings if value is not None]
    return [f"{size(event.active_bytes)} active", ", ".join(texts)]


def show_hint(console: Console, hint: str) -> None:
    """Print advice about a failure."""
    console.print(Text("hint: ", style="bold yellow") + Text(hint, style="default"))


def show_crash(crash: Crash, *, coords: dict[str, int], world_size: int) -> Console:
    """Print which rank failed first and why on standard error, and return the console for it."""
    console = console_on(stderr=True)
    first = crash.first
    # The reason of a hang contains a verb.
    verbs = {"hang": "", "waiting": "hung: ", "lost": "was lost: "}
    verb = verbs.get(first.kind, "failed first: ")
    body = Text(f"rank {first.rank} of {world_size} {verb}", style="bold")
    body.append(first.reason, style="bold red")
    if location := failure_place(vars(first), coords):
        body.append(f"\n{location}", style="dim")
    if first.traceback:
        body.append("\n\n" + _shown_frames(first.traceback.rstrip()), style="default")
    for text in fold_ranks(crash.followers, first=first.reason):
        body.append(f"\n{text}", style="dim")
    console.print(Panel(body, title="run failed", title_align="left", border_style="red"))
    if first.log:
        # Outside the panel, because the panel would wrap a long path.
        console.print(f"log: {escape(shortened(first.log))}", soft_wrap=True)
    return console


def _shown_frames(text: str) -> str:
    """Return the last lines of a traceback, without frames of torch and without underlines.

    If the traceback contains frames of user code, frames of this package and of the standard
    library are omitted too. A frame is its location line and its source line. The innermost frame
    is kept unless it is one of this package.
    """
    frames: list[list[str]] = []
    for line in text.splitlines():
        if line.strip(" ^~"):
            if line.startswith("    ") and frames:
                frames[-1].append(line)
            else:
                frames.append([line])
    calls = [
        (frame_owner(match["file"]), frame) for frame in frames if (match := _FRAME.match(frame[0]))
    ]
    has_user_code = any(owner == "user" for owner, _ in calls)
    libraries = {"torch", "python"} if has_user_code else {"torch"}
    hidden = {
        id(frame)
        for owner, frame in calls
        if (owner in libraries and frame is not calls[-1][1])
        or (owner == "axonlaunch" and has_user_code)
    }
    first, *rest = (frame for frame in frames if id(frame) not in hidden)
    cut = [["  ..."]] if sum(map(len, rest)) > _SHOWN else []
    while sum(map(len, rest)) > _SHOWN and len(rest) > 2:
        rest.pop(0)
    return "\n".join(line for frame in [first, *cut, *rest] for line in frame)
