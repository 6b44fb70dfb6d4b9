"""Reads the run folders that are named on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from axonlaunch.diagnostics.report.record.run_record import RunRecord


def read_runs(names: Sequence[str]) -> list[RunRecord]:
    """Read the records of runs.

    Args:
        names: Folders or fsspec URLs of runs, or folders that contain runs. Of the latter,
            unreadable runs are left out.

    Raises:
        ConfigError: Some are not folders of runs; lists all of them.
    """
    from axonlaunch.config import ConfigError, ConfigIssue, suggest_run_folder
    from axonlaunch.config.values.url import is_url
    from axonlaunch.diagnostics.report.record.run_record import NotARunError, find_runs, read_run

    records: list[RunRecord] = []
    problems = []
    for text in names:
        try:
            if is_url(text):
                records.append(_read_remote(text))
                continue
            is_sweep = has_runs(Path(text))
            runs = [run for run in find_runs(Path(text)) if is_sweep and run.status != "unreadable"]
            records += runs or [read_run(Path(text))]
        except NotARunError as error:
            problems.append(ConfigIssue("", f"{error}{suggest_run_folder(Path(text))}"))
    if problems:
        raise ConfigError(problems)
    return records


def has_runs(folder: Path) -> bool:
    """Return whether a folder is no run but contains runs."""
    from axonlaunch.config import CONFIG
    from axonlaunch.diagnostics.report.record.run_record import find_runs

    return not (folder / CONFIG).exists() and next(find_runs(folder), None) is not None


def _read_remote(url: str) -> RunRecord:
    from axonlaunch.checkpoint.format.storage import reaching, storage_path
    from axonlaunch.diagnostics.report.record.run_record import read_run

    path = storage_path(url)
    with reaching(path):
        return read_run(path)
