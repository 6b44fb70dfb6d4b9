"""How a rank failed, and who of several failed first.

Plain records that travel between processes and machines as JSON; whoever failed needs to have said
nothing himself.
"""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from axonlaunch.flight_record import Call, Record

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
        record: Of its collectives, where it was asked.
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


def judge(reports: Sequence[Report]) -> Crash:
    """Blame signals first, then errors that are not about connections, then the earliest."""
    reports = with_collectives(reports)
    first = min(reports, key=lambda report: _SUSPICION[report.kind])
    if first.kind == "waiting":
        reason = f"every rank waits for others, this one {first.reason}"
        first = dataclasses.replace(first, reason=reason)
    others = {r.rank: r.reason for r in reversed(reports) if r.rank != first.rank}
    return Crash(first, tuple(sorted(others.items())))


def with_collectives(reports: Sequence[Report]) -> list[Report]:
    """Add to what hanging ranks told the collective that each is in, and who never came there.

    A rank whose own code hangs, with a collective open that another has not come to, waits for that
    one: on an accelerator all of a rank's Python may be far ahead of its device.
    """
    records = {report.rank: report.record for report in reports if report.record is not None}
    found = []
    for report in reports:
        calls = () if report.record is None else report.record.open
        told = [(call, _absence(call, records)) for call in calls]
        told.sort(key=lambda pair: not pair[1])  # what others are missing from first
        if not told or (report.kind == "hang" and not told[0][1]):
            found.append(report)
            continue
        call, missing = told[0]
        size = f" ({call.num_bytes:,} bytes)" if call.num_bytes else ""
        reason = f"{report.reason}: {call.op} {call.number} of {call.axis}{size}{missing}"
        found.append(dataclasses.replace(report, kind="waiting", reason=reason))
    return found


def _absence(call: Call, records: Mapping[int, Record]) -> str:
    """Say which ranks that told of themselves have not begun a collective, or begun another."""
    there = {rank: records[rank] for rank in call.ranks if rank in records}
    absent = [r for r, record in there.items() if record.begun.get(call.group, 0) < call.number]
    words = f", to which {plain_ranks(absent)} never came" if absent else ""
    for rank, record in there.items():
        for other in record.open:
            same = (other.group, other.number) == (call.group, call.number)
            if same and not other.is_like(call):
                words += f", where rank {rank} is in {other.op} of {other.num_bytes:,} bytes"
    return words


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
