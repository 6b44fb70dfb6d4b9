"""Before data moves: every rank says what it is about to do, and all continue or none does.

One small exchange a call, so that a mismatch is an error on every rank and never a hang. NCCL
has no part in it: there a small message costs a device round trip, and
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` makes torch check its calls instead.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from axonlaunch.comm.backend import Backend
from axonlaunch.comm.errors import MismatchError, say_mismatch

if TYPE_CHECKING:
    from axonlaunch.comm.process_group import ProcessGroup

_REFUSED = "!"
_TAG = 41_328
"""A tag of its own, so that these lines never meet a user's messages."""

LINE_BYTES = 512


def check_collective(
    group: ProcessGroup, line: str, *, problem: Exception | None = None
) -> list[str]:
    """Check that every rank of the group says the same up to a ``|``; return what each said.

    Args:
        group: The group; this rank is a member.
        line: What this rank is about to do.
        problem: Why it can't: raised here, and reported to the others so that they don't wait.

    Raises:
        MismatchError: Ranks say different things, or another rank has a problem.
    """
    if group.backend is Backend.NCCL or group.size == 1:
        if problem is not None:
            raise problem
        return [line] * group.size
    lines = exchange(group, line if problem is None else f"{_REFUSED}{problem}")
    if problem is not None:
        raise problem
    check_same(group.ranks, lines)
    return lines


def check_p2p(
    peer: int, group: ProcessGroup, verb: str, what: str, *, problem: Exception | None = None
) -> None:
    """Check that one other rank of the group means the other end of the same message.

    Args:
        peer: The other rank, a global one.
        group: The group of both.
        verb: ``send`` or ``recv``.
        what: What is sent or expected.
        problem: Why this rank can't: raised here, and reported to the other.

    Raises:
        MismatchError: The other rank means something else, or has a problem.
    """
    if group.backend is Backend.NCCL:
        if problem is not None:
            raise problem
        return
    line = f"{verb} {'to' if verb == 'send' else 'from'} rank {peer} of {what}|{verb}|{what}"
    said = exchange_with(peer, group, line if problem is None else f"{_REFUSED}{problem}")
    if problem is not None:
        raise problem
    me = group.ranks[group.rank]
    if said.startswith(_REFUSED):
        raise MismatchError(f"rank {peer} refused its call: {said.removeprefix(_REFUSED)}")
    _, their_verb, their_what = said.split("|")
    if their_verb == verb:
        raise MismatchError(f"ranks {me} and {peer} both {verb}: one must send, the other recv")
    if their_what != what:
        raise MismatchError(
            f"rank {me} calls {verb} with {what}, but rank {peer} calls {their_verb} with "
            f"{their_what}: give both the same shape and dtype"
        )


def check_same(ranks: tuple[int, ...], lines: list[str]) -> None:
    """Raise unless all ranks say the same, and no rank a problem.

    Args:
        ranks: Global ranks of the group.
        lines: What each said, by its place in the group; what follows a ``|`` may differ.

    Raises:
        MismatchError: It says which ranks differ, and by what, or which refused its call.
    """
    for rank, said in zip(ranks, lines, strict=True):
        if said.startswith(_REFUSED):
            raise MismatchError(f"rank {rank} refused its call: {said.removeprefix(_REFUSED)}")
    heads = [said.partition("|")[0] for said in lines]
    if len(set(heads)) > 1:
        raise MismatchError(say_mismatch(ranks, dict(zip(ranks, heads, strict=True))))


def exchange(group: ProcessGroup, line: str) -> list[str]:
    """Give every rank of a gloo or mock group the line of each, by rank in the group."""
    torch_group = group.torch_group
    if group.backend is Backend.MOCK:
        lines: list[str] = torch_group.exchange(line)  # type: ignore[attr-defined]
        return lines
    received = [torch.empty(LINE_BYTES, dtype=torch.uint8) for _ in group.ranks]
    dist.all_gather(received, pack(line), group=torch_group)
    return [unpack(tensor) for tensor in received]


def exchange_with(peer: int, group: ProcessGroup, line: str) -> str:
    """Give one other rank of a gloo or mock group this rank's line, and return its line."""
    torch_group = group.torch_group
    if group.backend is Backend.MOCK:
        theirs: str = torch_group.exchange_with(peer, line)  # type: ignore[attr-defined]
        return theirs
    received = torch.empty(LINE_BYTES, dtype=torch.uint8)
    works = [
        dist.isend(pack(line), peer, group=torch_group, tag=_TAG),
        dist.irecv(received, peer, group=torch_group, tag=_TAG),
    ]
    for work in works:
        assert work is not None
        work.wait()
    return unpack(received)


def pack(line: str) -> torch.Tensor:
    """Write a line as ``LINE_BYTES`` bytes; the end of a long one becomes its digest."""
    data = line.encode()
    if len(data) > LINE_BYTES:
        digest = hashlib.sha256(data).hexdigest()[:16].encode()
        data = data[: LINE_BYTES - len(digest) - 4] + b"... " + digest
    return torch.frombuffer(bytearray(data.ljust(LINE_BYTES, b"\0")), dtype=torch.uint8)


def unpack(tensor: torch.Tensor) -> str:
    """Read what ``pack`` wrote."""
    return bytes(tensor.tolist()).rstrip(b"\0").decode(errors="replace")
