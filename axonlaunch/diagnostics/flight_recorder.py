"""Reads unfinished collectives of a rank from torch's flight recorder.

torch records collectives of gloo and NCCL, but not gloo's sends and receives. This module imports
torch only when it reads the recorder, so that other processes can read records without torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

_MAX_OPEN = 4
"""Maximum number of unfinished collectives that are reported for each group."""


@dataclass(frozen=True, kw_only=True)
class OpenCollective:
    """A collective that a rank has begun.

    Attributes:
        group: Backend and name of the group, the same on every rank.
        axis: Mesh axis of the group, or ``world``.
        ranks: Ranks of the group.
        number: Number of collectives begun in this group, including this one.
        op: torch's name of the operation.
        num_bytes: Size of its inputs in bytes.
    """

    group: str
    axis: str
    ranks: tuple[int, ...]
    number: int
    op: str
    num_bytes: int

    def is_like(self, other: OpenCollective) -> bool:
        """Return whether another rank's call with the same number can be the same collective."""
        return self.op == other.op and (self.num_bytes == other.num_bytes or self.is_uneven)

    @property
    def is_uneven(self) -> bool:
        """Whether ranks may pass inputs of different sizes."""
        return any(word in self.op for word in ("gather", "scatter", "alltoall", "all_to_all"))


@dataclass(frozen=True, kw_only=True)
class Record:
    """The collectives of a rank.

    Attributes:
        begun: Number of collectives begun, by group.
        open: Unfinished collectives, earliest first. Only the earliest of each group are listed,
            because a host may be thousands of collectives ahead of its device.
    """

    begun: Mapping[str, int]
    open: tuple[OpenCollective, ...]

    def to_json(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Return the record from the parsed JSON of ``to_json``."""
        calls = (
            OpenCollective(**{**call, "ranks": tuple(call["ranks"])}) for call in content["open"]
        )
        return cls(begun=content["begun"], open=tuple(calls))


def take() -> Record:
    """Return this process's record. Any thread may call it, also while other threads wait."""
    from axonlaunch.comm.torch_internals import ranks_of_groups

    begun: dict[str, int] = {}
    open_: list[tuple[int, OpenCollective]] = []
    ranks = ranks_of_groups()
    for entry in _entries():
        if entry["is_p2p"]:
            continue
        backend, _, op = entry["profiling_name"].rpartition(":")
        name, axis = entry["process_group"]
        group, number = f"{backend} {name}", entry["collective_seq_id"]
        begun[group] = max(begun.get(group, 0), number)
        if entry["retired"] or entry["state"] == "completed":
            continue
        call = OpenCollective(
            group=group,
            axis="world" if axis == "default_pg" else axis.removeprefix("mesh_"),
            ranks=ranks.get(name, ()),
            number=number,
            op=op.strip("_"),
            num_bytes=_num_bytes(entry["input_sizes"], entry["input_dtypes"]),
        )
        open_.append((entry["time_created_ns"], call))
    earliest: list[OpenCollective] = []
    for _, call in sorted(open_, key=lambda pair: pair[0]):
        if sum(call.group == other.group for other in earliest) < _MAX_OPEN:
            earliest.append(call)
    return Record(begun=begun, open=tuple(earliest))


def begun_collectives() -> list[tuple[int, str]]:
    """Return (start in nanoseconds since the epoch, axis) of each collective."""
    return sorted((entry["time_created_ns"], entry["process_group"][1]) for entry in _entries())


def dump() -> bytes:
    """Return everything that torch recorded, as a pickle in the format of torch's tools.

    Stacks are left out, because resolving the lines of two thousand of them takes seconds. Empty if
    this build of torch has no recorder.
    """
    from axonlaunch.comm.torch_internals import flight_recorders

    options = {"includeCollectives": True, "includeStackTraces": False, "onlyActive": False}
    dumps = (recorder(**options) for recorder in flight_recorders(as_json=False))
    return max(dumps, key=len, default=b"")  # recorders of unused backends are empty


def _entries() -> Iterator[dict[str, Any]]:
    from axonlaunch.comm.torch_internals import flight_recorders

    for recorder in flight_recorders(as_json=True):
        yield from json.loads(recorder()).get("entries", ())


def _num_bytes(sizes: list[list[int]], dtypes: list[str]) -> int:
    """Return the size of a call's inputs in bytes; torch reports dtypes by their C++ names."""
    return sum(
        _BYTES.get(dtype, 1) * math.prod(size) for size, dtype in zip(sizes, dtypes, strict=True)
    )


_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
}
