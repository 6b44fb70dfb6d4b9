"""Memory, cores and private folders of this node, without torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def memory_bytes() -> int:
    """Return the memory of this node in bytes, or less if cgroups allow this process less."""
    from axonlaunch.system.node import cgroup_memory  # not needed for --help

    return min(physical_memory_bytes(), cgroup_memory.limit_bytes() or sys.maxsize)


def physical_memory_bytes() -> int:
    """Return the physical memory of this node, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory_bytes() -> int:
    """Return the bytes available without swapping, as far as cgroups allow them to this process.

    All memory is available if the system does not say how much is free.
    """
    from axonlaunch.system.node import cgroup_memory

    allowed = cgroup_memory.free_limit_bytes()
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        [kib] = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        kib = str(memory_bytes() >> 10)
    return min(int(kib) << 10, sys.maxsize if allowed is None else allowed)


OMP_NUM_THREADS = "OMP_NUM_THREADS"
"""Environment variable with the number of threads of a process, read by OpenMP and by torch."""


def threads(*, ranks: int) -> int:
    """Return the number of threads for each rank.

    It is that of ``OMP_NUM_THREADS``, else an equal share of this process's cores.

    Raises:
        ValueError: ``OMP_NUM_THREADS`` is not a number of threads.
    """
    return requested_threads() or max(1, cores() // ranks)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def requested_threads() -> int | None:
    """Return the number of threads that the user requests by ``OMP_NUM_THREADS``.

    Returns:
        The number, the first of a list for nested levels (``4,2``); None if the user did not set
        it. torchrun sets it to 1 for its ranks if the user did not.

    Raises:
        ValueError: ``OMP_NUM_THREADS`` is not a number of threads.
    """
    text = os.environ.get(OMP_NUM_THREADS, "").partition(",")[0].strip()
    if not text or (text == "1" and _is_set_by_torchrun()):
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ValueError("expected a number of threads, 1 or more")
    return int(text)


def _is_set_by_torchrun() -> bool:
    """Return whether torchrun started this process and has no ``OMP_NUM_THREADS`` itself."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    try:  # the environment that the parent was started with
        variables = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return not any(each.startswith(f"{OMP_NUM_THREADS}=".encode()) for each in variables)


def private_folder(path: Path) -> Path:
    """Create a folder, if it does not exist, that only this user can enter.

    Raises:
        OSError: The folder can't be created or belongs to another user.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat(follow_symlinks=False)
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & 0o077:
        path.chmod(0o700)
    return path
