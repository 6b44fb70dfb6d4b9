"""Reads a run for a script or a notebook: its numbers as columns of numpy or frames of pandas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from axonlaunch.checkpoint.format.storage import reaching, storage_path
from axonlaunch.config import ConfigError, ConfigIssue, suggest_run_folder
from axonlaunch.diagnostics.report.record.run_record import NotARunError, RunStatus, read_run
from axonlaunch.diagnostics.report.system_figures import samples_by_node

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
        system: Columns of the samples of each node by its name: ``time`` in seconds since 1970,
            ``cpu``, ``memory_bytes``, ``gpu_use_0`` of the first GPU, ...
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
    system: Mapping[str, MetricColumns]
    summary: dict[str, Any]
    estimate: dict[str, Any] | None
    crash: dict[str, Any] | None
    events: list[dict[str, Any]]

    def frame(
        self, table: Literal["metrics", "evaluations", "system"] = "metrics"
    ) -> pandas.DataFrame:
        """Return one of the tables as a frame of pandas, with a row per line.

        Args:
            table: ``metrics``, ``evaluations``, or ``system`` with the column ``node``.

        Raises:
            ModuleNotFoundError: pandas is not installed.
            ValueError: There is no such table.
        """
        import pandas

        if table not in ("metrics", "evaluations", "system"):
            raise ValueError(f"table={table!r}: use 'metrics', 'evaluations' or 'system'")
        if table != "system":
            return pandas.DataFrame(dict(getattr(self, table)))
        frames = [
            pandas.DataFrame({"node": node, **columns}) for node, columns in self.system.items()
        ]
        return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame()


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
            samples = samples_by_node(run)
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
        system={node: _columns(_with_gpu_columns(events)) for node, events in samples.items()},
        summary=run.summary,
        estimate=run.estimate,
        crash=run.crash,
        events=run.events,
    )


def _with_gpu_columns(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return samples whose lists, a number for each GPU, are keys such as ``gpu_use_0``."""
    flat = []
    for sample in samples:
        values = {key: value for key, value in sample.items() if key not in ("event", "host")}
        for key in [key for key, value in values.items() if isinstance(value, list)]:
            numbers = values.pop(key)
            values |= {f"{key}_{index}": number for index, number in enumerate(numbers)}
        flat.append(values)
    return flat


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
