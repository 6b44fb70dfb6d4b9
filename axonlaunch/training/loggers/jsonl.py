"""``metrics.jsonl``: what a run logs and reads again when it resumes.

It takes events and refuses none; what is not its own it leaves.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from axonlaunch.events import Counted, Evaluated, Event, StepLogged, named_by_unit, perplexity_of
from axonlaunch.system.files import append_text, is_there, open_regular, replace
from axonlaunch.system.strict_json import finite


class JSONLLogger:
    """A line of JSON a logged step, and one an evaluation.

    It is the run's own record: where it can't be written, the run fails, as it does where a
    checkpoint can't.

    Attributes:
        notes: What is to be said of what the file held before.
        last_step: The last step that the file held before; 0 where none is resumed.
    """

    notes: tuple[str, ...]

    def __init__(self, path: Path, *, resumed_at: int | None, counted: Counted = "tokens") -> None:
        """Open the file; what a run that was not resumed finds in it is kept beside it.

        Lines after the step that a run resumes from are dropped: they are written again. Lines that
        can't be read are dropped too, from a file of which a copy is kept.

        Args:
            path: The file.
            resumed_at: Steps done in the checkpoint that was loaded; None: none was.
            counted: What targets are, for the names of their numbers.

        Raises:
            OSError: It can't be read or written.
        """
        self._counted = counted
        content = _content(path)
        lines, unreadable = _lines(content)
        lines_before = [] if resumed_at is None else [t for t, step in lines if step <= resumed_at]
        reasons = []
        if content and resumed_at is None:
            reasons.append("of a run before, which this one does not resume")
        elif unreadable:
            reasons.append(f"{unreadable} of its lines can't be read")
        if reasons:
            aside = _free(path)
            replace(aside, content)
            reasons = [f"{path.name}: {reasons[0]}; it is kept as {aside.name}"]
        self.notes = tuple(reasons)
        self.last_step = 0 if resumed_at is None else max((step for _, step in lines), default=0)
        replace(path, b"".join(lines_before))
        self._path = path
        self._last = lines_before[-1] if lines_before else b""

    def __call__(self, event: Event) -> None:
        """Append an event that has numbers."""
        if isinstance(event, StepLogged):
            # What this device does not report, or nobody saw, has no key.
            line: dict[str, Any] = {
                key: value
                for key, value in asdict(event).items()
                if value is not None or key in ("grad_norm", "tokens_seen")
            }
        elif isinstance(event, Evaluated):
            line = {"step": event.step, "eval_loss": event.eval_loss}
            if event.perplexity is not None:
                line["perplexity"] = event.perplexity
            if event.sources:
                line["sources"] = {
                    name: {"eval_loss": loss, "perplexity": perplexity_of(loss)}
                    for name, loss in event.sources.items()
                }
        else:
            return
        line = named_by_unit(line, self._counted)
        text = json.dumps(finite(line), allow_nan=False) + "\n"
        if text.encode() != self._last:  # an evaluation that a run was killed after is done again
            append_text(self._path, text)
        self._last = b""


def _content(path: Path) -> bytes:
    """Return what a file holds; nothing where there is none."""
    try:
        with open_regular(path) as stream:
            return stream.read()
    except FileNotFoundError:
        return b""


def _lines(content: bytes) -> tuple[list[tuple[bytes, int]], int]:
    """Return whole lines with their steps, and how many can't be read.

    A run that was killed while writing leaves half a one, which is no loss.
    """
    *whole, _ = content.split(b"\n")
    lines, unreadable = [], 0
    for text in whole:
        try:
            step = json.loads(text)["step"]
            if not isinstance(step, int):
                raise TypeError(step)
        except (ValueError, KeyError, TypeError, RecursionError):
            unreadable += 1
        else:
            lines.append((text + b"\n", step))
    return lines, unreadable


def _free(path: Path) -> Path:
    """Return a name beside a file that is not taken: metrics.1.jsonl, metrics.2.jsonl, ..."""
    for number in itertools.count(1):
        free = path.with_name(f"{path.stem}.{number}{path.suffix}")
        if not is_there(free):
            return free
    raise AssertionError("count ended")
