"""Follows a job of a scheduler: its states and the log of rank 0, until it ends.

SLURM and Kubernetes share it: each describes its jobs as a ``FollowedJob``.
"""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TextIO

_INTERRUPTED = 130
_POLL_S = 1.0


@dataclass(frozen=True)
class JobState:
    """State of a job.

    Attributes:
        name: The scheduler's name of the state.
        note: Line for the user about the state; empty if it needs none.
        status: Exit status of the command if the job has ended; None while it has not.
    """

    name: str
    note: str = ""
    status: int | None = None


class JobFolders(Protocol):
    """A job with the folders in which it writes."""

    @property
    def run_dir(self) -> str:
        """Run folder, as the job sees it."""

    @property
    def checkpoints(self) -> str:
        """Folder or URL of the checkpoints; empty for the run folder."""


def shared_folder(job: JobFolders, other: JobFolders) -> tuple[str, str] | None:
    """Return the key and the folder in which two jobs would both write; None if there is none.

    Two runs in one folder of checkpoints would delete each other's, and a bucket has no locks.
    """
    if job.run_dir == other.run_dir:
        return "run_dir", job.run_dir
    folder, used = (each.checkpoints or each.run_dir for each in (job, other))
    key = "checkpoint.path" if job.checkpoints else "run_dir"
    return (key, folder) if folder.rstrip("/") == used.rstrip("/") else None


def decode_whole(content: bytes) -> tuple[str, int]:
    """Decode UTF-8 up to a character that is cut off at the end, whose rest is still to come.

    Returns:
        The text, and the number of bytes that it takes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(content)
    return text, len(content) - len(decoder.getstate()[0])


class FollowedJob(Protocol):
    """A submitted job."""

    @property
    def name(self) -> str:
        """Name of the run."""

    @property
    def scheduler(self) -> str:
        """The job in words."""

    @property
    def run_dir(self) -> str:
        """Run folder, as the job sees it."""

    @property
    def left(self) -> str:
        """Line for the user after Ctrl-C, which does not end the job."""

    def state(self) -> JobState:
        """Return the current state."""

    def read_log(self, *, rank: int = 0) -> str:
        """Return what was added since the last call to the log of a rank."""

    def stop(self) -> str:
        """Let the run save a checkpoint and end; return a line for the user.

        Raises:
            ConfigError: The scheduler refuses it, or the job has ended.
        """

    def resume(self) -> str:
        """Continue a stopped run in the same folder; return a line for the user.

        Raises:
            ConfigError: The scheduler refuses it, or the job has not been stopped.
        """


def follow_job(
    job: FollowedJob,
    announce: Callable[[str], None],
    *,
    rank: int = 0,
    log: TextIO | None = None,
) -> tuple[int, str]:
    """Print the log of a job until it ends or Ctrl-C is pressed.

    Args:
        announce: Receives the notes of new states.
        rank: Rank whose log is printed.
        log: Stream that receives the log; None: standard error.

    Returns:
        The exit status, 130 after Ctrl-C, and the name of the last state.
    """
    noted = ""
    try:
        while True:
            now = job.state()
            if now.status is None and now.note not in ("", noted):
                announce(now.note)
            noted = now.note
            if added := job.read_log(rank=rank):
                stream = log or sys.stderr
                stream.write(added)
                stream.flush()
            if now.status is not None:
                announce(now.note)
                return now.status, now.name
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        announce(job.left)
        return _INTERRUPTED, job.state().name
