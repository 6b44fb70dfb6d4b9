"""TensorBoard's events, beside ``metrics.jsonl`` and under its names.

It writes scalars alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from axonlaunch.config.loggers import TensorBoardConfig
from axonlaunch.training.loggers.base import Logger, Number, RunInfo


class TensorBoardLogger(Logger):
    """Scalars; those after the step that a run resumes from are hidden."""

    rewinds = True

    def __init__(self, config: TensorBoardConfig) -> None:
        del config  # it has no settings

    def start(self, run: RunInfo) -> None:
        """Open a writer."""
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run.run_dir / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=(run.resumed_at or 0) + 1)

    def log(self, metrics: Mapping[str, Number], *, step: int) -> None:
        """Write the numbers of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        """Write what is left."""
        del failed
        self._writer.close()
