"""Files that a run's numbers are written to: ``metrics.jsonl`` and TensorBoard's events.

They take events and refuse none; what is not theirs they leave.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from axonlaunch.events import Evaluated, Event, Finished, Stepped, finite
from axonlaunch.files import append_text, replace_text


class MetricsFile:
    """A line of JSON a logged step, and one an evaluation."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        """Open the file; lines after the step that a run resumes from are dropped.

        Args:
            path: The file.
            after_step: Steps done before the next line.
        """
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= after_step]
        replace_text(path, "".join(kept))
        self._path = path

    def __call__(self, event: Event) -> None:
        """Append an event that has numbers."""
        if isinstance(event, Stepped):
            line = asdict(event)
            if event.slowest is None:
                del line["slowest"]  # only where ranks were seen to wait for each other
        elif isinstance(event, Evaluated):
            line = {"step": event.step, "eval_loss": event.eval_loss}
        else:
            return
        append_text(self._path, json.dumps(finite(line), allow_nan=False) + "\n")


def _lines(path: Path) -> list[str]:
    """Return whole lines; a run that was killed while writing leaves half a one."""
    if not path.is_file():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]


class TensorBoard:
    """Scalars under the names of ``metrics.jsonl``."""

    def __init__(self, folder: Path, *, after_step: int) -> None:
        """Open a writer; events after the step that a run resumes from are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=after_step + 1)

    def __call__(self, event: Event) -> None:
        """Write an event's numbers, and close with the last one."""
        if isinstance(event, Stepped | Evaluated):
            for name, value in asdict(event).items():
                if name != "step" and isinstance(value, int | float):
                    self._writer.add_scalar(name, value, event.step)
        elif isinstance(event, Finished):
            self._writer.close()
