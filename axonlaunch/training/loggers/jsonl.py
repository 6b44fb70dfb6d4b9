"""Writes ``metrics.jsonl``, the run's log of metrics, which it reads again when it resumes."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from axonlaunch.events import (
    Evaluated,
    Event,
    StepLogged,
    perplexity_of,
)
from axonlaunch.system.storage.files import append_text, is_there, open_regular, replace
from axonlaunch.system.storage.strict_json import finite
from axonlaunch.system.text.units import Counted, named_by_unit


class JSONLLogger:
    """Writes a JSON line for each logged step and each evaluation.

    An error while writing ends the run, just like an error while saving a checkpoint.

    Attributes:
        notes: Notes to show about the previous content of the file.
        last_step: Last step in the previous content; 0 if the run is not resumed.
    """

    notes: tuple[str, ...]

    def __init__(self, path: Path, *, resumed_at: int | None, counted: Counted = "tokens") -> None:
        """Open the file and keep the lines up to the resumed step.

        Later lines are dropped, because the run writes them again. If the run is not resumed, or if
        lines can't be read, the previous file is first copied to a new name in the same folder.

        Args:
            path: Path of the file.
            resumed_at: Step of the checkpoint that was loaded; None if none was.
            counted: Unit that the loss counts, used in names of metrics.

        Raises:
            OSError: The file can't be read or written.
        """
        self._counted = counted
        content = _content(path)
        lines, unreadable = _lines(content)
        kept_lines = [] if resumed_at is None else [t for t, step in lines if step <= resumed_at]
        reasons = []
        if content and resumed_at is None:
            reasons.append("it is from an earlier run, which this run does not resume")
        elif unreadable:
            reasons.append(f"{unreadable} of its lines can't be read")
        if reasons:
            copy = _free_path(path)
            replace(copy, content)
            reasons = [f"{path.name}: {reasons[0]}; it is kept as {copy.name}"]
        self.notes = tuple(reasons)
        self.last_step = 0 if resumed_at is None else max((step for _, step in lines), default=0)
        replace(path, b"".join(kept_lines))
        self._path = path
        self._last = kept_lines[-1] if kept_lines else b""

    def __call__(self, event: Event) -> None:
        """Append an event with metrics; ignore others."""
        if isinstance(event, StepLogged):
            # Values that are unknown or not available on this device are omitted.
            line: dict[str, Any] = {
                key: value
                for key, value in asdict(event).items()
                if value is not None or key in ("grad_norm", "tokens_seen")
            }
        elif isinstance(event, Evaluated):
            line = {"step": event.step, "eval_loss": event.eval_loss}
            if event.perplexity is not None:
                line["perplexity"] = event.perplexity
            line |= {f"eval_{name}": value for name, value in event.metrics.items()}
            if event.sources:
                line["sources"] = {
                    name: {"eval_loss": loss, "perplexity": perplexity_of(loss)}
                    for name, loss in event.sources.items()
                }
        else:
            return
        line = named_by_unit(line, self._counted)
        text = json.dumps(finite(line), allow_nan=False) + "\n"
        # If a run was killed after an evaluation, the resumed run repeats it.
        if text.encode() != self._last:
            # Do not create a deleted file again: it would begin in the middle of the run.
            append_text(self._path, text, creates=False)
        self._last = b""


def _content(path: Path) -> bytes:
    """Return the content of a file; empty if it does not exist."""
    try:
        with open_regular(path) as stream:
            return stream.read()
    except FileNotFoundError:
        return b""


def _lines(content: bytes) -> tuple[list[tuple[bytes, int]], int]:
    """Return complete lines with their steps, and the number of invalid lines.

    An incomplete last line, from a run that was killed while writing, is ignored.
    """
    *complete, _ = content.split(b"\n")
    lines, unreadable = [], 0
    for text in complete:
        try:
            step = json.loads(text)["step"]
            if not isinstance(step, int):
                raise TypeError(step)
        except (ValueError, KeyError, TypeError, RecursionError):
            unreadable += 1
        else:
            lines.append((text + b"\n", step))
    return lines, unreadable


def _free_path(path: Path) -> Path:
    """Return the first numbered path that does not exist: metrics.1.jsonl, metrics.2.jsonl, ..."""
    for number in itertools.count(1):
        free = path.with_name(f"{path.stem}.{number}{path.suffix}")
        if not is_there(free):
            return free
    raise AssertionError("count ended")
