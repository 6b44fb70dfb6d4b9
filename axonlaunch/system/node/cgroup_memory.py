"""Memory that the cgroups of this process allow, as in containers and jobs of a scheduler.

Both versions of cgroups are read: https://docs.kernel.org/admin-guide/cgroup-v2.html and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_UNLIMITED = 1 << 60
"""Version 1 has a number of about this size where no limit is set."""
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")

_KILLS = {_V2: "memory.events", _V1: "memory.oom_control"}
"""Files with the number of killed processes, by version."""
_RECENT_S = 5.0
"""Seconds between two counts of killed processes."""


def limit_bytes(root: Path = _ROOT) -> int | None:
    """Return the lowest memory limit of this process's cgroups and those above; None without."""
    return min((limit for limit, _ in _limits(root)), default=None)


def free_limit_bytes(root: Path = _ROOT) -> int | None:
    """Return how many more bytes the cgroups allow; None without a limit.

    Pages of files that were not used lately don't count as used, because the kernel drops them.
    """
    return min((max(0, limit - used) for limit, used in _limits(root)), default=None)


def oom_kills(root: Path = _ROOT) -> int:
    """Return how many processes of this process's cgroup the kernel has killed for memory.

    They were killed because the memory of the system ran out, or that of this cgroup or of one
    above it. The number is 0 if the kernel does not count them.
    """
    for folder, files in _cgroups(root):
        try:
            lines = (folder / _KILLS[files]).read_text().splitlines()
            [kills] = [int(line.split()[1]) for line in lines if line.split()[0] == "oom_kill"]
        except (OSError, ValueError, IndexError):
            continue
        return kills
    return 0


class RecentKills:
    """Whether the kernel has lately killed a process of this cgroup for memory.

    Earlier kills, such as of a data process, don't explain the end of another process.
    """

    def __init__(self) -> None:
        """Begin to count."""
        self._older = self._newer = oom_kills()
        self._read_at = time.monotonic()

    def tick(self) -> None:
        """Forget kills that are older than a few seconds; to be called often."""
        if time.monotonic() - self._read_at > _RECENT_S:
            self._older, self._newer = self._newer, oom_kills()
            self._read_at = time.monotonic()

    def exist(self) -> bool:
        """Return whether there was one in the last seconds, or since the count began."""
        return oom_kills() > self._older


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the used bytes of each cgroup with a limit."""
    for folder, (limit_file, used_file, cached) in _cgroups(root):
        try:
            limit = int((folder / limit_file).read_text())  # a ValueError without limit: max
            lines = (folder / "memory.stat").read_text().splitlines()
            [dropped] = [int(line.split()[1]) for line in lines if line.split()[0] == cached]
            used = int((folder / used_file).read_text()) - dropped
        except (OSError, ValueError, IndexError):
            continue
        if limit < _UNLIMITED:
            yield limit, used


def _cgroups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folder of each cgroup of this process, and of those above it, and its files."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            mounted, files = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            mounted, files = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        # In a container the path may be that on the host, of which only the last folder exists.
        inside = PurePosixPath(path.lstrip("/"))
        for each in (inside, *inside.parents):
            if ".." not in each.parts:
                yield mounted / each, files
