"""How a rank failed, and how a run did.

Plain records that travel between processes and nodes as JSON; whoever failed needs to have said
nothing himself.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from axonlaunch.diagnostics.flight_recorder import Record

FailureKind = Literal["interrupted", "signal", "error", "hang", "lost", "connection", "waiting"]


_CAUSES = {
    errno.ENOSPC: "disk",
    errno.EDQUOT: "disk",
    errno.EMFILE: "files",
    errno.ENFILE: "files",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """The failure of a rank, or of all of a node's.

    Attributes:
        rank: Whose it was.
        kind: What sort of failure.
        reason: One line: the exception, or the signal, or the status.
        traceback: The rank's own; None where it died without one.
        host: Its host name.
        log: Its log on that node.
        step: Optimizer steps it had done; None before the first.
        doing: What it did then.
        cause: What is known to help against it: ``memory``, ``disk``, ``files``, ``folder``,
            ``loss``, ``types``, ``module NAME``, ``refused`` or nothing.
        memory_bytes: What its device had for this run, where memory ran out.
        record: Of its collectives, where it was asked.
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
        """Read what ``to_json`` wrote; what a later version added is left out."""
        known = {field.name for field in dataclasses.fields(cls)}
        content: dict[str, Any] = json.loads(text)
        if content.get("record") is not None:
            content["record"] = Record.of(content["record"])
        return cls(**{key: value for key, value in content.items() if key in known})


@dataclass(frozen=True)
class Crash:
    """Why a run failed.

    Attributes:
        first: The first failure.
        followers: Other ranks that failed after it, each with what it said.
    """

    first: Report
    followers: tuple[tuple[int, str], ...]

    def to_json(self) -> str:
        """Write it in one line."""
        return json.dumps([self.first.to_json(), self.followers])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote."""
        first, followers = json.loads(text)
        return cls(Report.from_json(first), tuple((rank, reason) for rank, reason in followers))


def report_of_rank(
    rank: int, kind: FailureKind, reason: str = "", *, log: Path, step: int | None, doing: str
) -> Report:
    """Return the report of a rank of this node.

    Args:
        rank: Whose it is.
        kind: What sort of failure.
        reason: One line; empty where it is yet to be found.
        log: The rank's.
        step: Optimizer steps it has done; None before the first.
        doing: What it was last seen to do.
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
    """Name what of this node ran out: ``disk``, open ``files``, or nothing."""
    if isinstance(error, OSError) and error.errno in _CAUSES:
        return _CAUSES[error.errno]
    text = str(error).lower()  # errors of saves and of torch's are of other kinds
    return next((cause for number, cause in _CAUSES.items() if _says(text, number)), "")


def _says(text: str, number: int) -> bool:
    return os.strerror(number).lower() in text


def plain_error(error: OSError) -> str:
    """Write what the system refused, and of which file: ``No space left on device: a/b``."""
    return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"


def plain_ranks(numbers: list[int]) -> str:
    """Write ranks with their runs shortened: ``ranks 0, 4-7``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(shown)}"


def exit_reason(status: int | None) -> str:
    """Say how a process ended that reported nothing itself."""
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        hint = "; the system may have run out of memory" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    if status is None:
        return (
            "ended, and how is not known: the fork server that would report it is gone or stopped"
        )
    return f"exited with status {status} before the end of training"
