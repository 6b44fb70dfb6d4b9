"""Determines which of several ranks failed first, from their reports.

The result depends only on the reports, so every node of a run comes to the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axonlaunch.diagnostics.failure_text import plain_ranks
from axonlaunch.diagnostics.flight_recorder import OpenCollective, Record
from axonlaunch.launch.failures.report import Crash, FailureKind, Report

_SUSPICION: dict[FailureKind, int] = {
    "interrupted": 0,
    "signal": 1,
    "error": 2,
    "hang": 3,
    "lost": 4,
    "connection": 5,
    "waiting": 6,
}
"""Order of blame, most likely root cause first. A killed process breaks its peers' connections, so
signals come before errors. A rank that only lost a connection, or that waits for others, is blamed
only if there is no other failure.
"""


def find_root_cause(reports: Sequence[Report]) -> Crash:
    """Return the first failure and the ranks that failed after it.

    Signals come before errors, errors before lost connections, and earlier reports before later
    ones. If all ranks wait, the first failure is that of a rank that others wait for and that does
    not wait for any of them.
    """
    missing = _missing(reports)
    reports = [_with_collective(report, missing.get(report.rank, [])) for report in reports]
    awaited = {rank for calls in missing.values() for call in calls for rank in call.ranks}
    first = min(
        reports,
        key=lambda report: (
            _SUSPICION[report.kind],
            report.rank not in awaited or any(call.ranks for call in missing.get(report.rank, [])),
        ),
    )
    if first.kind == "waiting":
        reason = f"every rank waits for others, this one {first.reason}"
        first = dataclasses.replace(first, reason=reason)
    others = {r.rank: r.reason for r in reversed(reports) if r.rank != first.rank}
    return Crash(first, tuple(sorted(others.items())))


@dataclass(frozen=True)
class MissingPeers:
    """The ranks that have not joined a collective which another rank has begun.

    Attributes:
        call: Collective that the other rank has begun.
        ranks: Ranks that have not begun it, and ranks without a record.
        never_joined: Description of these ranks, as the end of a sentence; empty if every rank has
            begun the same collective.
    """

    call: OpenCollective
    ranks: tuple[int, ...]
    never_joined: str


def _missing(reports: Sequence[Report]) -> dict[int, list[MissingPeers]]:
    """Return the missing peers of each open collective, by rank that reported a record."""
    records = {report.rank: report.record for report in reports if report.record is not None}
    unrecorded = {report.rank for report in reports if report.record is None}
    return {
        rank: [_missing_peers(call, records, unrecorded) for call in record.open]
        for rank, record in records.items()
    }


def _missing_peers(
    call: OpenCollective, records: Mapping[int, Record], unrecorded: set[int]
) -> MissingPeers:
    members = {rank: records[rank] for rank in call.ranks if rank in records}
    absent = [r for r, record in members.items() if record.begun.get(call.group, 0) < call.number]
    silent = [rank for rank in call.ranks if rank in unrecorded]
    text = f", which {plain_ranks(absent)} never joined" if absent else ""
    text += f", {plain_ranks(silent)} could not be asked" if silent else ""
    for rank, record in members.items():
        for other in record.open:
            same = (other.group, other.number) == (call.group, call.number)
            if same and not other.is_like(call):
                text += f", where rank {rank} is in {other.op} of {other.num_bytes:,} bytes"
    return MissingPeers(call, (*absent, *silent), text)


def _with_collective(report: Report, missing: Sequence[MissingPeers]) -> Report:
    """Add to a hanging rank's report its open collective and the peers that never joined it.

    A rank that hangs outside a collective also counts as waiting if it has an open collective which
    a peer has not joined: with an accelerator, Python may be far ahead of the device.
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
    """Return whether one of the reports is a cause and not the consequence of another failure.

    A rank that hangs with an open collective may wait in it for a rank that has not reported yet.
    """
    return any(
        report.kind not in ("connection", "waiting")
        and not (report.kind == "hang" and report.record is not None and report.record.open)
        for report in reports
    )
