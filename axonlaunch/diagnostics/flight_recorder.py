"""Which collectives a rank has begun and not ended, from torch's flight recorder.

It reports what torch records of gloo and NCCL; gloo's sends and receives are not among that.
Nothing here imports torch before it is asked, for those who read a record train nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

_OPEN = 4
"""Open collectives of a group that are reported."""


@dataclass(frozen=True, kw_only=True)
class OpenCollective:
    """A collective that a rank has begun.

    Attributes:
        group: Backend and group, named alike on every rank.
        axis: The group for people: a mesh axis, or ``world``.
        ranks: The group's.
        number: How many the rank has begun in this group, with this one.
        op: What it does, as torch calls it.
        num_bytes: Of its inputs.
    """

    group: str
    axis: str
    ranks: tuple[int, ...]
    number: int
    op: str
    num_bytes: int

    def is_like(self, other: OpenCollective) -> bool:
        """Whether another rank's call of the same number can be the same collective."""
        return self.op == other.op and (self.num_bytes == other.num_bytes or self.is_uneven)

    @property
    def is_uneven(self) -> bool:
        """Whether its ranks may give different bytes."""
        return any(word in self.op for word in ("gather", "scatter", "alltoall", "all_to_all"))


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a rank reported of its collectives.

    Attributes:
        begun: Group -> how many it has begun there.
        open: Those that are not done, the earliest first and of a group the earliest few: a host
            may be thousands ahead of its device.
    """

    begun: Mapping[str, int]
    open: tuple[OpenCollective, ...]

    def to_json(self) -> str:
        """Write it in one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` wrote, parsed."""
        calls = (
            OpenCollective(**{**call, "ranks": tuple(call["ranks"])}) for call in content["open"]
        )
        return cls(begun=content["begun"], open=tuple(calls))


def take() -> Record:
    """Return this process's record; any of its threads may ask, whatever the others wait for."""
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
    first: list[OpenCollective] = []
    for _, call in sorted(open_, key=lambda pair: pair[0]):
        if sum(call.group == other.group for other in first) < _OPEN:
            first.append(call)
    return Record(begun=begun, open=tuple(first))


def begun_collectives() -> list[tuple[int, str]]:
    """Return when each collective was begun, in nanoseconds since the epoch, and its axis."""
    return sorted((entry["time_created_ns"], entry["process_group"][1]) for entry in _entries())


def dump() -> bytes:
    """Return all that torch recorded, in the format of its own tools (a pickle).

    Without stacks: to name the lines of two thousand of them takes seconds. Empty where this build
    of torch has no recorder.
    """
    from axonlaunch.comm.torch_internals import flight_recorders

    what = {"includeCollectives": True, "includeStackTraces": False, "onlyActive": False}
    dumps = (recorder(**what) for recorder in flight_recorders(as_json=False))
    return max(dumps, key=len, default=b"")  # one that took no part has nothing to report


def _entries() -> Iterator[dict[str, Any]]:
    """Yield what torch recorded."""
    from axonlaunch.comm.torch_internals import flight_recorders

    for recorder in flight_recorders(as_json=True):
        yield from json.loads(recorder()).get("entries", ())


def _num_bytes(sizes: list[list[int]], dtypes: list[str]) -> int:
    """Return the bytes of a call's inputs, whose types torch reports as C++ names them."""
    return sum(
        _BYTES.get(dtype, 1) * math.prod(size) for size, dtype in zip(sizes, dtypes, strict=True)
    )


_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
}
