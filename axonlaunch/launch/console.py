"""What a run looks like in a terminal, and as plain lines where there is none.

It shows events; it decides nothing.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

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
from rich.text import Text

from axonlaunch.events import (
    Advanced,
    Evaluated,
    Event,
    Finished,
    Sampled,
    Saved,
    Started,
    Stepped,
)
from axonlaunch.launch.supervisor import Crash


class RunConsole:
    """Shows one run."""

    def __init__(self, *, run_dir: str, stream: TextIO | None = None) -> None:
        """Prepare to show a run; nothing is printed yet.

        Args:
            run_dir: The run's folder.
            stream: Where to; standard output if None.
        """
        self._run_dir = shortened(run_dir)
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=False)
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, event: Event) -> None:
        """Show an event."""
        match event:
            case Started():
                self._start(event)
            case Stepped():
                self._step(event)
            case Advanced():
                self._advance(event.step)
            case Evaluated():
                self._evaluated(event)
            case Saved():
                where = shortened(event.path)
                beside = event.stalled_s < 0.9 * event.seconds
                stood = f", of which training waited {event.stalled_s:.1f} s" if beside else ""
                self.line(f"[dim]saved {escape(where)} in {event.seconds:.1f} s{stood}[/dim]")
            case Sampled():
                self.stop()
                body = Text(event.prompt, style="bold") + Text(event.text)
                self._console.print(Panel(body, title="sample", title_align="left", style="dim"))
            case Finished():
                self.stop()

    def line(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(text)

    def log(self, text: str) -> None:
        """Print what the main rank printed, as it is."""
        self._console.print(Text(text), soft_wrap=True)

    def stop(self) -> None:
        """Take the progress bar away and leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def summary(self, rows: list[tuple[str, str]]) -> None:
        """Print the run's figures, a line each."""
        self.stop()
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self._console.print(f"[dim]{name:<{width}}[/dim]  {escape(value)}", soft_wrap=True)

    def _start(self, event: Started) -> None:
        self.line(
            f"[bold]{event.layout}[/bold] on {event.device}: "
            f"{quantity(event.parameters)} parameters, {quantity(event.samples)} samples, "
            f"steps {event.step} to {event.steps}"
        )
        self.line(f"[dim]run folder {escape(self._run_dir)}[/dim]")
        if event.resumed_from:
            self.line(f"resumed from {escape(shortened(event.resumed_from))}")
        for note in event.notes:
            self.line(f"[yellow]note[/yellow] {escape(note)}")
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            MofNCompleteColumn(),
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

    def _step(self, event: Stepped) -> None:
        speed = f"{quantity(event.tokens_per_s)} tok/s"
        memory = gibibytes(event.peak_memory_bytes)
        if self._progress is not None and self._task is not None:
            numbers = f"loss {event.loss:.3f}  {speed}  {memory}"
            self._progress.update(self._task, completed=event.step, numbers=numbers)
        elif not self._console.is_terminal:
            self.line(f"step {event.step}  loss {event.loss:.4f}  {speed}  {memory}")

    def _advance(self, step: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step)

    def _evaluated(self, event: Evaluated) -> None:
        versus = ""
        if event.unigram_entropy is not None:
            versus = f" [dim](byte-unigram entropy {event.unigram_entropy:.3f})[/dim]"
        self.line(f"step {event.step}  evaluation loss [bold]{event.eval_loss:.3f}[/bold]{versus}")


def show_crash(crash: Crash, *, log: str, world_size: int) -> None:
    """Print who failed first and why, on standard error."""
    console = Console(stderr=True, highlight=False)
    body = Text(f"rank {crash.rank} of {world_size} failed first: ", style="bold")
    body.append(crash.reason, style="bold red")
    if crash.traceback:
        body.append("\n\n" + crash.traceback.rstrip(), style="default")
    body.append(f"\n\nlog: {log}", style="default")
    if crash.followers:
        others = ", ".join(map(str, crash.followers))
        body.append(f"\nranks that failed after it: {others}", style="dim")
    console.print(Panel(body, title="run failed", title_align="left", border_style="red"))


def quantity(number: float) -> str:
    """Write a count in three figures: ``813``, ``1.84M``, ``41.2k``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def gibibytes(number: int) -> str:
    """Write bytes as MiB or GiB."""
    mebibytes = number / 1024**2
    return f"{mebibytes:.0f} MiB" if mebibytes < 1000 else f"{mebibytes / 1024:.2f} GiB"


def shortened(path: str) -> str:
    """Write a path from the working folder where it is below it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
