"""Temporary folders that are deleted however a process ends.

The folder of a killed process is deleted by the next process that creates one. Folders of running
processes are locked and kept.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from axonlaunch.system.node import host
from axonlaunch.system.storage import cache

_PREFIX = "axonlaunch-"
_LOCK = ".lock"
_LONGEST = 107 - len("/axonlaunch-01234567/listener-01234567")
"""Maximum bytes of the base path, so that socket addresses fit into Linux's limit of 107 bytes."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder that only this user can enter, and delete it at the end of the context.

    It is in TMPDIR unless socket addresses would be too long there or creating it fails.

    Raises:
        OSError: No folder can be created in any location.
    """
    folder = _create_folder()
    lock = os.open(folder / ".new", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # The kernel releases the lock however this process ends. The file gets its final name only
        # after it is locked, so sweep never sees an unlocked file.
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / ".new").rename(folder / _LOCK)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def keep_kernels(otherwise: Path) -> None:
    """Make torch.compile cache its kernels in a folder to which only this user can write.

    torch's default is /tmp/torchinductor_<user>. Another user could create it first, and torch
    would load their files.

    Args:
        otherwise: Private folder to use if the user's cache folder can't be created.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    try:
        kernels = host.private_folder(cache.cache_folder() / "inductor")
    except OSError:  # there is no home folder, or it is not writable
        kernels = host.private_folder(otherwise / "inductor")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(kernels)


def _create_folder() -> Path:
    # Not tempfile.gettempdir(), which tests a folder by writing a file and fails on a full disk.
    configured = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP", "XDG_RUNTIME_DIR")]
    bases = [base for base in configured if base and len(os.fsencode(base)) <= _LONGEST]
    errors: list[OSError] = []
    for base in [*bases, "/tmp", "/var/tmp", "/dev/shm"]:
        try:
            sweep(Path(base))
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError as error:
            errors.append(error)
    raise errors[0]


def sweep(base: Path) -> None:
    """Delete the temporary folders of this user's killed processes.

    Args:
        base: Folder that contains the temporary folders.
    """
    for file in base.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # another user's folder, or one that another run has deleted
            lock = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(file.parent, ignore_errors=True)
            finally:
                os.close(lock)
