"""Records of the failure of a rank (``Report``) and of a run (``Crash``).

They are sent between processes and nodes as JSON. A report can be made without a message from the
rank that failed.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from axonlaunch.diagnostics.flight_recorder import Record
from axonlaunch.system.processes.death_signals import cause_of_signal, signal_name

FailureKind = Literal["interrupted", "signal", "error", "hang", "lost", "connection", "waiting"]


_CAUSES = {
    errno.ENOSPC: "disk",
    errno.EDQUOT: "disk",
    errno.EMFILE: "files",
    errno.ENFILE: "files",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """The failure of a rank, or of all ranks of a node.

    Attributes:
        rank: Global rank that failed.
        kind: Kind of failure.
        reason: One line: the exception, the signal or the exit status.
        traceback: Traceback of the rank; None if it ended without one.
        host: Host name of the rank's node.
        log: Path of the rank's log on that node.
        step: Number of optimizer steps done; None before training.
        doing: Phase of the rank at the time of the failure.
        cause: Known cause, which selects the hint: ``memory``, ``disk``, ``files``, ``folder``,
            ``loss``, ``types``, ``module NAME`` or ``refused``; empty if unknown.
        memory_bytes: Bytes of device memory that this rank could use, if memory ran out.
        record: Record of the rank's collectives, if it was requested.
    """

    rank: int
    kind: FailureKind
    reason: str
    traceback: str | None = None
    host: str = ""
    log: str = ""
    step: int | None = None
    doing: str = ""
    cause: str = ""
    memory_bytes: int | None = None
    record: Record | None = None

    def to_json(self) -> str:
        """Write the report in one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the output of ``to_json``, without fields that a later version added."""
        fields = {field.name for field in dataclasses.fields(cls)}
        content: dict[str, Any] = json.loads(text)
        if content.get("record") is not None:
            content["record"] = Record.of(content["record"])
        return cls(**{key: value for key, value in content.items() if key in fields})


@dataclass(frozen=True)
class Crash:
    """The failure of a run.

    Attributes:
        first: The first failure, which is the root cause.
        followers: Rank and reason of each later failure.
    """

    first: Report
    followers: tuple[tuple[int, str], ...]

    def to_json(self) -> str:
        """Write the crash in one line."""
        return json.dumps([self.first.to_json(), self.followers])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the output of ``to_json``."""
        first, followers = json.loads(text)
        return cls(Report.from_json(first), tuple((rank, reason) for rank, reason in followers))


def report_of_rank(
    rank: int, kind: FailureKind, reason: str = "", *, log: Path, step: int | None, doing: str
) -> Report:
    """Return the report of a rank of this node.

    Args:
        rank: Global rank.
        kind: Kind of failure.
        reason: One line; empty if it is not yet known.
        log: Path of the rank's log.
        step: Number of optimizer steps done; None before training.
        doing: Last recorded phase of the rank.
    """
    return Report(
        rank=rank,
        kind=kind,
        reason=reason,
        host=socket.gethostname(),
        log=str(log),
        step=step,
        doing=doing,
    )


def report_of_system(error: Exception, *, rank: int) -> Report:
    """Return the report of a rank that this node could not start."""
    return Report(
        rank=rank,
        kind="error",
        reason=f"can't be started: {plain_error(error) if isinstance(error, OSError) else error}",
        host=socket.gethostname(),
        cause=cause_of(error),
    )


def cause_of(error: BaseException) -> str:
    """Return the exhausted resource of this node: ``disk``, ``files`` (open files) or ``""``."""
    if isinstance(error, OSError) and error.errno in _CAUSES:
        return _CAUSES[error.errno]
    text = str(error).lower()  # errors of saves and of torch are not an OSError
    return next((cause for number, cause in _CAUSES.items() if _is_about(text, number)), "")


def _is_about(text: str, number: int) -> bool:
    return os.strerror(number).lower() in text


def plain_error(error: OSError) -> str:
    """Return an error of the system with the file's path: ``No space left on device: a/b``."""
    return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"


def exit_reason(status: int | None) -> str:
    """Return the reason for the failure of a process that sent no report."""
    if status is not None and status < 0:
        cause = cause_of_signal(-status)
        return f"killed by {signal_name(-status)}{f'; {cause}' if cause else ''}"
    if status is None:
        return (
            "ended with an unknown status: the fork server that would report it is gone or stopped"
        )
    return f"exited with status {status} before the end of training"
