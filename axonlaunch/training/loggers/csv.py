"""Writes ``metrics.csv`` with a row for each logged step and each evaluation.

The columns are fixed; metrics without a column are omitted.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import fields

from axonlaunch.config.options.loggers import CSVConfig
from axonlaunch.events import Evaluated, StepLogged
from axonlaunch.system.storage.files import append_text, read_text, replace_text
from axonlaunch.system.text.units import named_by_unit
from axonlaunch.training.loggers.base import Logger, Number, RunInfo

_FIELDS = [field.name for field in fields(StepLogged) if field.name != "slowest"]
_FIELDS += [field.name for field in fields(Evaluated) if field.name != "step"]
_LARGEST = 1 << 30
"""Maximum bytes of an existing table that is read."""


class CSVLogger(Logger):
    """Logger to a CSV table. Rows after the step of the resumed checkpoint are removed."""

    rewinds = True

    def __init__(self, config: CSVConfig) -> None:
        del config  # it has no settings

    def start(self, run: RunInfo) -> None:
        """Write the header and the existing rows up to the resumed step."""
        self._path = run.run_dir / "metrics.csv"
        self._columns = [*named_by_unit(dict.fromkeys(_FIELDS), run.counted)]
        earlier: list[dict[str, str]] = []
        if run.resumed_at is not None and self._path.exists():
            rows = csv.DictReader(io.StringIO(read_text(self._path, at_most=_LARGEST)))
            earlier = [row for row in rows if int(row["step"]) <= run.resumed_at]
        text = io.StringIO()
        table = csv.DictWriter(text, self._columns, extrasaction="ignore")
        table.writeheader()
        table.writerows(earlier)
        replace_text(self._path, text.getvalue())

    def log(self, metrics: Mapping[str, Number], *, step: int) -> None:
        """Append a row. Cells without a value are empty."""
        text = io.StringIO()
        table = csv.DictWriter(text, self._columns, extrasaction="ignore")
        table.writerow({**metrics, "step": step})
        append_text(self._path, text.getvalue())
