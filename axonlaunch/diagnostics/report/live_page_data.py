"""The data of runs that may still train, made again only when their files have changed.

What it costs is bounded: after it was made it is not made again for twenty times as long.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonlaunch.diagnostics.report.page_data import page_data
from axonlaunch.diagnostics.report.run_record import FILES, NotARunError, RunReader, is_running

_REST = 20.0
"""Seconds of rest for a second of work: a page of 100,000 steps takes a core's twentieth."""


class LivePageData:
    """Returns what a page of some runs shows now; it may be called from several threads."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Remember the folders of the runs.

        Args:
            paths: Of this node.
        """
        self._paths = list(paths)
        self._readers = [RunReader(path) for path in self._paths]
        self._lock = threading.Lock()
        self._resting_until = 0.0
        self._seen: list[object] = []
        self._data: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        """Return it; what was last read of runs that can't be read any more.

        Raises:
            NotARunError: A folder can't be read the first time.
        """
        with self._lock:
            if time.monotonic() < self._resting_until:
                return self._data
            seen: list[object] = [_state(path / name) for path in self._paths for name in FILES]
            seen += [is_running(path) for path in self._paths]
            if seen != self._seen:
                began = time.thread_time()
                try:
                    self._data = page_data([reader.read() for reader in self._readers])
                except NotARunError:
                    if not self._data:
                        raise
                self._seen = seen
                self._resting_until = time.monotonic() + _REST * (time.thread_time() - began)
            return self._data


def _state(file: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(file, follow_symlinks=False)  # noqa: PTH116
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
