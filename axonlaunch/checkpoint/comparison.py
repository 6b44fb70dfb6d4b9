"""A checkpoint held against its own run, and against another checkpoint.

Tensors are read some at a time, so that no checkpoint need fit in memory whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from axonlaunch.checkpoint import folders, reader
from axonlaunch.checkpoint.folders import Checkpoint
from axonlaunch.config import RunConfig

if TYPE_CHECKING:
    from torch import Tensor


READ_BYTES = 2**28
"""Of the tensors that are read at once: each reading goes through a checkpoint's whole index."""


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from one of the same name.

    Attributes:
        name: Of the tensor, ``"model."`` or ``"optimizer."`` first.
        largest: Difference of an element; None where only one has the tensor, or shapes differ.
        relative: The norm of the difference over the norm of the first; None likewise.
        reason: Why there is no number.
    """

    name: str
    largest: float | None
    relative: float | None
    reason: str = ""


def faults(checkpoint: Checkpoint, config: RunConfig) -> list[str]:
    """Return what is wrong with a checkpoint whose sizes are right: contents, and what it lacks.

    Args:
        checkpoint: It is read whole.
        config: Of its run.
    """
    from axonlaunch.models.build import construct

    found = [f"{name} {folders.CHANGED}" for name in folders.damage(checkpoint)]
    if found:
        return found
    model = construct(config.model, seed=config.seed)
    return reader.differences(checkpoint, model)


def compare(first: Checkpoint, second: Checkpoint) -> list[Difference]:
    """Return how two checkpoints differ, parameters first, the farthest before others.

    Equal tensors are left out.
    """
    ours, theirs = reader.contents(first), reader.contents(second)
    for one in (first, second):
        reader.refuse_damage(one)
    found = [
        Difference(name, None, None, f"only in {(first if name in ours else second).path}")
        for name in sorted(ours.keys() ^ theirs.keys())
    ]
    alike = []
    for name in sorted(ours.keys() & theirs.keys()):
        sizes = [list(one[name].size) for one in (ours, theirs)]
        if sizes[0] == sizes[1]:
            alike.append(name)
        else:
            found.append(Difference(name, None, None, f"{sizes[0]} and {sizes[1]}"))
    for names in _groups(alike, ours):
        read = [_tensors(*one, names) for one in ((first, ours), (second, theirs))]
        for name in names:
            a, b = (tensors[name].double() for tensors in read)
            apart = (a - b).abs()
            if apart.numel() and float(apart.max()) > 0:
                norm = float(a.norm())
                relative = float(apart.norm()) / norm if norm else float("inf")
                found.append(Difference(name, float(apart.max()), relative))
    return sorted(found, key=_order)


def _groups(names: Iterable[str], contents: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield names whose tensors come to ``READ_BYTES``, or one whose tensor is larger."""
    group: list[str] = []
    held = 0
    for name in names:
        entry = contents[name]
        size = entry.size.numel() * entry.properties.dtype.itemsize
        if group and held + size > READ_BYTES:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    if group:
        yield group


def _order(one: Difference) -> tuple[bool, bool, float, str]:
    elsewhere = not one.name.startswith("model.")
    return elsewhere, one.largest is not None, -(one.largest or 0.0), one.name


def _tensors(
    checkpoint: Checkpoint, contents: Mapping[str, Any], names: Iterable[str]
) -> dict[str, Tensor]:
    """Read tensors that torch's index has entries of."""
    import torch

    tensors = {
        name: torch.empty(contents[name].size, dtype=contents[name].properties.dtype)
        for name in names
    }
    state: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        section, _, rest = name.partition(".")
        state.setdefault(section, {})[rest] = tensor
    reader.read(checkpoint, state)
    return tensors
