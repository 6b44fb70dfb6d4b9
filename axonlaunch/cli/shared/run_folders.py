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
        names: Folders or fsspec URLs of runs.

    Raises:
        ConfigError: Some are not folders of runs; lists all of them.
    """
    from axonlaunch.config import ConfigError, ConfigIssue, suggest_run_folder
    from axonlaunch.config.values.url import is_url
    from axonlaunch.diagnostics.report.record.run_record import NotARunError, read_run

    records, problems = [], []
    for text in names:
        try:
            records.append(_read_remote(text) if is_url(text) else read_run(Path(text)))
        except NotARunError as error:
            problems.append(ConfigIssue("", f"{error}{suggest_run_folder(Path(text))}"))
    if problems:
        raise ConfigError(problems)
    return records


def _read_remote(url: str) -> RunRecord:
    from axonlaunch.checkpoint.format.storage import reaching, storage_path
    from axonlaunch.diagnostics.report.record.run_record import read_run

    path = storage_path(url)
    with reaching(path):
        return read_run(path)
