"""Leases of folders in buckets, which have no locks.

The run that keeps its checkpoints in a folder writes a small file there and renews it. Whether a
lease has ended is decided by the clock of the storage, because clocks of nodes differ.

Storage such as S3 and Google Cloud Storage creates the file only if it does not exist. Other
storage may let two runs that start within the same second both take the lease.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from axonlaunch.checkpoint.format.storage import filesystem

LEASE = "lease.json"
ENDS_S = 300.0
"""Seconds without a renewal after which a lease has ended."""
_RENEWED_S = 60.0
"""Seconds between renewals."""
_SETTLED_S = 2.0
"""Seconds after which a run that has replaced an ended lease reads whether another has, too."""
_LONGEST = 4096
"""Length of names in a lease that are not printed."""


class LeaseHeldError(Exception):
    """Another run holds the lease of a folder; the message is that run in words."""


def refuse_leased(folder: Path, *, owner: str) -> None:
    """Refuse a remote folder that another run has leased, and write no lease.

    Raises:
        LeaseHeldError: Another run holds the lease.
    """
    _Lease(folder, owner, "").refuse_held()


@contextmanager
def hold_lease(folder: Path, *, owner: str, run_dir: str) -> Iterator[None]:
    """Hold the lease of a remote folder.

    Args:
        folder: Folder, as ``upath.UPath``.
        owner: Identifies the run in all of its starts. A start takes over the lease of an earlier
            one of the same run, which may have been killed.
        run_dir: Run folder, for messages of other runs.

    Raises:
        LeaseHeldError: Another run holds the lease.
        OSError: The storage refuses the file; its clients also have other errors.
    """
    lease = _Lease(folder, owner, run_dir)
    lease.take()
    ended = threading.Event()
    renewals = threading.Thread(target=lease.renew, args=(ended,), daemon=True)
    renewals.start()
    try:
        yield
    finally:
        ended.set()
        renewals.join()
        lease.release()


class _Lease:
    """The lease of a folder."""

    def __init__(self, folder: Path, owner: str, run_dir: str) -> None:
        self._folder, self._file = folder, folder / LEASE
        self._storage, self._path = filesystem(folder), cast("Any", self._file).path
        self._token = secrets.token_hex(8)
        self._content = {
            "owner": owner,
            "token": self._token,
            "run_dir": run_dir,
            "host": socket.gethostname(),
        }

    def refuse_held(self) -> dict[str, Any] | None:
        """Return the content of a lease that can be replaced; None if there is none.

        Raises:
            LeaseHeldError: Another run holds the lease.
        """
        there = self._read()
        if there is None or there.get("owner") == self._content["owner"] or self._has_ended():
            return there
        raise _refusal(there)

    def take(self) -> None:
        """Create the lease, or replace it.

        Raises:
            LeaseHeldError: Another run holds the lease.
        """
        replaced = self.refuse_held()
        self._folder.mkdir(parents=True, exist_ok=True)
        may_race = replaced is not None and replaced.get("owner") != self._content["owner"]
        try:
            self._write(mode="create" if replaced is None else "overwrite")
        except FileExistsError:  # another run has just created it
            raise _refusal(self._read() or {}) from None
        except Exception:  # storage that creates no file on a condition has errors of its own
            if self._read() is not None:
                raise
            self._write(mode="overwrite")
            may_race = True
        if may_race:
            time.sleep(_SETTLED_S)
        if (there := self._read()) is None or there.get("token") != self._token:
            raise _refusal(there or {})

    def renew(self, ended: threading.Event) -> None:
        """Renew the lease until an event is set, or another run has taken it."""
        while not ended.wait(_RENEWED_S):
            with suppress(Exception):  # storage that does not answer now may answer the next time
                there = self._read() or {}
                if there.get("token") != self._token:
                    sys.stderr.write(
                        f"warning: {_in_words(there)} has taken over {self._folder}; end one of "
                        "the two, because they delete each other's checkpoints\n"
                    )
                    return
                self._write(mode="overwrite")

    def release(self) -> None:
        """Delete the lease if this run still holds it."""
        with suppress(Exception):  # it ends without a renewal
            if (self._read() or {}).get("token") == self._token:
                self._storage.rm_file(self._path)

    def _read(self) -> dict[str, Any] | None:
        """Return the content; empty if it is not a lease's, None if the file does not exist."""
        try:
            there = json.loads(self._storage.cat_file(self._path))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return there if isinstance(there, dict) else {}

    def _write(self, *, mode: str) -> None:
        content = json.dumps(self._content, indent=1).encode()
        self._storage.pipe_file(self._path, content, mode=mode)

    def _has_ended(self) -> bool:
        """Return whether the lease is old, compared with a file that is written now."""
        probe = f"{self._path}.{self._token}"
        self._storage.pipe_file(probe, b"now")
        try:
            age = self._storage.modified(probe) - self._storage.modified(self._path)
        finally:
            self._storage.rm_file(probe)
        return bool(age > timedelta(seconds=ENDS_S))


def _refusal(there: dict[str, Any]) -> LeaseHeldError:
    return LeaseHeldError(_in_words(there))


def _in_words(there: dict[str, Any]) -> str:
    """Return the run that has written a lease; anybody who can write to the bucket may have."""
    names = [str(there.get(key, "")) for key in ("run_dir", "host")]
    if all(name.isprintable() and 0 < len(name) < _LONGEST for name in names):
        return f"the run of {names[0]} on {names[1]}"
    return "another run"
