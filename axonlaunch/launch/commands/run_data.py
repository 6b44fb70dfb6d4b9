"""Reads a run for a script or a notebook: metrics as columns of numpy or a frame of pandas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonlaunch.checkpoint.format.storage import reaching, storage_path
from axonlaunch.config import ConfigError, ConfigIssue, suggest_run_folder
from axonlaunch.diagnostics.report.record.run_record import NotARunError, RunStatus, read_run

if TYPE_CHECKING:
    import numpy as np
    import pandas

MetricColumns = Mapping[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run that has finished, is running, or has crashed.

    Attributes:
        path: Folder of the run.
        name: Name of the run.
        status: running, done, interrupted, failed, killed, unknown or unreadable.
        config: Configuration by dotted key, ``config["optimizer.lr"]``.
        metrics: Columns of the logged steps by name: ``step``, ``loss``, ``lr``, ... Numbers are
            float64, NaN where a step has no value; other values are objects.
        evaluations: Columns of the evaluations: ``step``, ``eval_loss``, ``eval_accuracy``, ...
        summary: Content of ``summary.json``; {} if there is none.
        estimate: Estimated peak memory with its parts; None if nothing was estimated.
        crash: Report of the rank that failed first; None if no rank failed.
        events: Events of all attempts, in order of time.
    """

    path: Path
    name: str
    status: RunStatus
    config: dict[str, Any]
    metrics: MetricColumns
    evaluations: MetricColumns
    summary: dict[str, Any]
    estimate: dict[str, Any] | None
    crash: dict[str, Any] | None
    events: list[dict[str, Any]]

    def frame(self) -> pandas.DataFrame:
        """Return the metrics as a frame of pandas, one row per logged step.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        import pandas

        return pandas.DataFrame(dict(self.metrics))


def load_run(path: str | Path) -> RunData:
    """Read a run's folder; it may still be training.

    Args:
        path: Folder or fsspec URL of the run.

    Raises:
        ConfigError: The path is not the folder of a run.
    """
    folder = storage_path(str(path))
    try:
        with reaching(folder):
            run = read_run(folder)
    except NotARunError as error:
        message = f"{error}{suggest_run_folder(folder)}"
        raise ConfigError([ConfigIssue("", message)]) from None
    return RunData(
        path=run.path,
        name=run.name,
        status=run.status,
        config=run.config,
        metrics=_columns(run.steps),
        evaluations=_columns(run.evaluations),
        summary=run.summary,
        estimate=run.estimate,
        crash=run.crash,
        events=run.events,
    )


def _columns(lines: Sequence[Mapping[str, Any]]) -> MetricColumns:
    """Return the values of each key of the lines as an array [lines]."""
    import numpy as np

    columns: dict[str, np.ndarray[Any, Any]] = {}
    for key in dict.fromkeys(key for line in lines for key in line):
        values = [line.get(key) for line in lines]
        if all(value is None or isinstance(value, int | float) for value in values):
            columns[key] = np.array([np.nan if value is None else value for value in values], float)
        else:
            columns[key] = np.empty(len(values), object)
            columns[key][:] = values
    return columns
