"""How a rank failed, and who of several failed first.

Plain records that travel between processes and machines as JSON; whoever failed needs to have said
nothing himself.
"""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

Kind = Literal["interrupted", "signal", "error", "hang", "lost", "connection", "waiting"]
_SUSPICION: dict[Kind, int] = {
    "interrupted": 0,
    "signal": 1,
    "error": 2,
    "hang": 3,
    "lost": 4,
    "connection": 5,
    "waiting": 6,
}
"""Whom to blame first. A process that died without a word pulls its peers' connections down; an
error of a rank's own is not about a connection; one that only says that another rank was gone, or
that waits for another, is never the first where there is any other.
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The failure of a rank, or of all of a machine's.

    Attributes:
        rank: Whose it was.
        kind: What sort of failure.
        reason: One line: the exception, or the signal, or the status.
        traceback: The rank's own; None where it died without one.
        machine: Its host name.
        log: Its log on that machine.
        step: Optimizer steps it had done; None before the first.
        doing: What it did then.
        cause: What is known to help against it: ``memory``, ``disk``, ``loss``, ``module NAME``,
            ``refused`` or nothing.
        memory_bytes: What its device had for this run, where memory ran out.
    """

    rank: int
    kind: Kind
    reason: str
    traceback: str | None = None
    machine: str = ""
    log: str = ""
    step: int | None = None
    doing: str = ""
    cause: str = ""
    memory_bytes: int | None = None

    def to_json(self) -> str:
        """Write the report in one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote; what a later version added is left out."""
        known = {field.name for field in dataclasses.fields(cls)}
        content: dict[str, Any] = json.loads(text)
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


def judge(reports: Sequence[Report]) -> Crash:
    """Blame signals first, then errors that are not about connections, then the earliest."""
    first = min(reports, key=lambda report: _SUSPICION[report.kind])
    if first.kind == "waiting":
        reason = f"every rank waits for others, this one {first.reason}"
        first = dataclasses.replace(first, reason=reason)
    others = {r.rank: r.reason for r in reversed(reports) if r.rank != first.rank}
    return Crash(first, tuple(sorted(others.items())))


def is_conclusive(reports: Sequence[Report]) -> bool:
    """Whether one of them is more than the echo of another failure."""
    return any(report.kind not in ("connection", "waiting") for report in reports)


def exit_reason(status: int | None) -> str:
    """Say how a process ended that told nothing itself."""
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        hint = "; the system may have run out of memory" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"exited with status {status} before the end of training"
