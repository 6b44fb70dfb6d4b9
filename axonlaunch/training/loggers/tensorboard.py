"""Writes scalars to TensorBoard event files, with the same names as in ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping

from axonlaunch.config.options.loggers import TensorBoardConfig
from axonlaunch.training.loggers.logger import Logger, Number, RunInfo


class TensorBoardLogger(Logger):
    """Logger to TensorBoard. Scalars after the step of the resumed checkpoint are hidden."""

    rewinds = True

    def __init__(self, config: TensorBoardConfig) -> None:
        del config  # it has no settings

    def start(self, run: RunInfo) -> None:
        """Open a writer."""
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run.run_dir / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=(run.resumed_at or 0) + 1)

    def log(self, metrics: Mapping[str, Number], *, step: int) -> None:
        """Write the metrics of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        """Flush and close the writer."""
        del failed
        self._writer.close()
