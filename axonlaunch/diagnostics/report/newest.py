"""The data of runs that may still train, read again only when their files have changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonlaunch.diagnostics.report.page_data import page_data
from axonlaunch.diagnostics.report.run_record import FILES, is_running, read_run


class NewestData:
    """Returns what a page of some runs shows now; it may be called from several threads."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Remember the folders of the runs.

        Args:
            paths: Of this node.
        """
        self._paths = list(paths)
        self._lock = threading.Lock()
        self._seen: list[object] = []
        self._data: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        """Return it.

        Raises:
            NotARunError: A folder is gone.
        """
        with self._lock:
            seen: list[object] = [_state(path / name) for path in self._paths for name in FILES]
            seen += [is_running(path) for path in self._paths]
            if seen != self._seen:
                self._data = page_data([read_run(path) for path in self._paths])
                self._seen = seen
            return self._data


def _state(file: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(file, follow_symlinks=False)  # noqa: PTH116
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
