"""Temporary folders that no run leaves behind, however it ends.

One that a killed process left is deleted by the next; the folder of a process that lives is not.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from axonlaunch.system import cache, host

_PREFIX = "axonlaunch-"
_LOCK = ".lock"
_LONGEST = 107 - len("/axonlaunch-01234567/listener-01234567")
"""Bytes of a path below which the address of a socket fits: Linux takes 107."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that this user alone can enter, and delete it on leaving.

    It is in TMPDIR, unless a socket's address below that would be too long or nothing can be made
    there.

    Raises:
        OSError: No folder can be made anywhere.
    """
    made = _make()
    lock = os.open(made / ".new", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # The kernel lets go of the lock however this process ends. Nobody looks at a file of
        # another name, so none is seen that is not locked yet.
        fcntl.flock(lock, fcntl.LOCK_EX)
        (made / ".new").rename(made / _LOCK)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def keep_kernels(otherwise: Path) -> None:
    """Have torch.compile keep its kernels where this user alone can write.

    Torch's own place, /tmp/torchinductor_<user>, can be made by anybody before, and what lies there
    is loaded.

    Args:
        otherwise: A private folder, for a user without a cache.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    try:
        kernels = host.private_folder(cache.cache_folder() / "inductor")
    except (OSError, RuntimeError):  # no home, or not a writable one
        kernels = host.private_folder(otherwise / "inductor")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(kernels)


def _make() -> Path:
    # Not tempfile.gettempdir(): it writes a file to try a folder, which a full disk refuses.
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
    """Delete the folders of processes that were killed, this user's alone.

    Args:
        base: The folder in which theirs are.
    """
    for left in base.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # another user's, or deleted by another run meanwhile
            lock = os.open(left, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left.parent, ignore_errors=True)
            finally:
                os.close(lock)
