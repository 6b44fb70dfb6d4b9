"""A logger that appends a line of text a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import axonlaunch as ax


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """Lines of text in the run folder."""

    name: str = "table"
    """name of the logger"""
    file: str = "table.txt"
    """name of the file"""


@ax.register_logger("table", config=TableConfig)
class Table(ax.Logger):
    """Lines of text in the run folder."""

    def __init__(self, config: TableConfig) -> None:
        self._config = config

    def start(self, run) -> None:
        """Open the file; a resumed run appends to it."""
        self._file = (run.run_dir / self._config.file).open("a")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append the loss of a step."""
        if "loss" in metrics:
            self._file.write(f"{step} {metrics['loss']}\n")

    def close(self, *, failed: bool) -> None:
        """Close the file."""
        self._file.write("failed\n" if failed else "closed\n")
        self._file.close()
