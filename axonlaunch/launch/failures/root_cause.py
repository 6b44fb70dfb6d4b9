"""Who of several ranks failed first, judged by what each reported.

It reads reports and nothing else, so that every node of a run would judge alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axonlaunch.diagnostics.flight_recorder import OpenCollective, Record
from axonlaunch.launch.failures.report import Crash, FailureKind, Report, plain_ranks

_SUSPICION: dict[FailureKind, int] = {
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


def find_root_cause(reports: Sequence[Report]) -> Crash:
    """Blame signals first, then errors that are not about connections, then the earliest.

    Where all wait, it is the one that others wait for and that waits for none of them.
    """
    missing = _missing(reports)
    reports = [_with_collective(report, missing.get(report.rank, [])) for report in reports]
    missed = {rank for calls in missing.values() for call in calls for rank in call.ranks}
    first = min(
        reports,
        key=lambda report: (
            _SUSPICION[report.kind],
            report.rank not in missed or any(call.ranks for call in missing.get(report.rank, [])),
        ),
    )
    if first.kind == "waiting":
        reason = f"every rank waits for others, this one {first.reason}"
        first = dataclasses.replace(first, reason=reason)
    others = {r.rank: r.reason for r in reversed(reports) if r.rank != first.rank}
    return Crash(first, tuple(sorted(others.items())))


@dataclass(frozen=True)
class MissingPeers:
    """What a collective that a rank has begun still waits for.

    Attributes:
        ranks: Those that have not begun it, as far as is known.
        never_joined: The same, as the end of a sentence; empty where every rank has begun it.
    """

    call: OpenCollective
    ranks: tuple[int, ...]
    never_joined: str


def _missing(reports: Sequence[Report]) -> dict[int, list[MissingPeers]]:
    """Return for each rank that reported its collectives what those that are open wait for."""
    records = {report.rank: report.record for report in reports if report.record is not None}
    mute = {report.rank for report in reports if report.record is None}
    return {
        rank: [_waited_for(call, records, mute) for call in record.open]
        for rank, record in records.items()
    }


def _waited_for(
    call: OpenCollective, records: Mapping[int, Record], mute: set[int]
) -> MissingPeers:
    there = {rank: records[rank] for rank in call.ranks if rank in records}
    absent = [r for r, record in there.items() if record.begun.get(call.group, 0) < call.number]
    silent = [rank for rank in call.ranks if rank in mute]
    which = f", which {plain_ranks(absent)} never joined" if absent else ""
    which += f", {plain_ranks(silent)} could not be asked" if silent else ""
    for rank, record in there.items():
        for other in record.open:
            same = (other.group, other.number) == (call.group, call.number)
            if same and not other.is_like(call):
                which += f", where rank {rank} is in {other.op} of {other.num_bytes:,} bytes"
    return MissingPeers(call, (*absent, *silent), which)


def _with_collective(report: Report, missing: Sequence[MissingPeers]) -> Report:
    """Add to a hanging rank's report the collective that it is in, and who never joined it.

    A rank whose own code hangs, with a collective open that another has not come to, waits for that
    one: on an accelerator all of a rank's Python may be far ahead of its device.
    """
    if not missing:
        return report
    peer = next((peer for peer in missing if peer.never_joined), missing[0])
    if report.kind == "hang" and not peer.never_joined:
        return report
    size = f" ({peer.call.num_bytes:,} bytes)" if peer.call.num_bytes else ""
    call = f"{peer.call.op} {peer.call.number} of {peer.call.axis}{size}"
    reason = f"{report.reason}: {call}{peer.never_joined}"
    return dataclasses.replace(report, kind="waiting", reason=reason)


def is_conclusive(reports: Sequence[Report]) -> bool:
    """Whether one of the reports is a cause, rather than a consequence of another failure.

    A rank that hangs with a collective open may wait in it for a rank that has not reported yet.
    """
    return any(
        report.kind not in ("connection", "waiting")
        and not (report.kind == "hang" and report.record is not None and report.record.open)
        for report in reports
    )
