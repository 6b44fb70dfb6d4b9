"""Returns page data of runs that may still train, computed again only after their files change.

The cost is bounded: after a computation, the result is reused for at least twenty times as long as
the computation took.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonlaunch.diagnostics.report.page_data import page_data
from axonlaunch.diagnostics.report.record.node_samples import ranks_with_events
from axonlaunch.diagnostics.report.record.run_record import (
    FILES,
    NotARunError,
    RunReader,
    is_running,
)
from axonlaunch.system.storage.run_files import events_of_rank

_REST = 20.0
"""Seconds of reuse per second of computation; limits the load to a twentieth of a core."""


class LivePageData:
    """Returns the current page data of runs; can be called from several threads."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Remember the folders of the runs.

        Args:
            paths: Folders on this node.
        """
        self._paths = list(paths)
        self._readers = [RunReader(path) for path in self._paths]
        self._lock = threading.Lock()
        self._resting_until = 0.0
        self._states: list[object] = []
        self._data: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        """Return the page data; the previous data if a run can't be read any more.

        Raises:
            NotARunError: A folder can't be read at the first call.
        """
        with self._lock:
            if time.monotonic() < self._resting_until:
                return self._data
            states: list[object] = [_state(file) for path in self._paths for file in _files(path)]
            states += [is_running(path) for path in self._paths]
            if states != self._states:
                began = time.thread_time()
                try:
                    self._data = page_data([reader.read() for reader in self._readers])
                except NotARunError:
                    if not self._data:
                        raise
                self._states = states
                self._resting_until = time.monotonic() + _REST * (time.thread_time() - began)
            return self._data


def _files(path: Path) -> list[Path]:
    """Return the files of a run's folder whose changes the page shows."""
    return [path / name for name in (*FILES, *map(events_of_rank, ranks_with_events(path)))]


def _state(file: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(file, follow_symlinks=False)  # noqa: PTH116
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
