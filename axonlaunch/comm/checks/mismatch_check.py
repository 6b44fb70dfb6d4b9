"""Compares the calls of ranks before data moves, so that either all ranks continue or none.

There is one small exchange for each call, so a mismatch is an error on every rank and never a hang.
There are no checks on NCCL, where a small message takes a round trip to the device. With
``TORCH_DISTRIBUTED_DEBUG=DETAIL``, torch checks its calls instead.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from axonlaunch.comm.backend import Backend
from axonlaunch.comm.errors import MismatchError, format_mismatch

if TYPE_CHECKING:
    from axonlaunch.comm.process_group import ProcessGroup

_REFUSED = "!"
_TAG = 41_328
"""Message tag for these exchanges, so that they are never matched with a user's messages."""

LINE_BYTES = 512


def check_collective(
    group: ProcessGroup, line: str, *, problem: Exception | None = None
) -> list[str]:
    """Check that all ranks of a group make the same call; return the line of each rank.

    The part of the line before the first ``|`` must be the same on all ranks. On NCCL nothing is
    compared, and the result repeats this rank's line.

    Args:
        group: Group that contains this rank.
        line: Description of this rank's call.
        problem: Reason why this rank can't continue. It is raised here and reported to the other
            ranks, so that they don't wait.

    Raises:
        MismatchError: Lines differ between ranks, or another rank has a problem.
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
    """Check that another rank of the group performs the other end of the same message.

    On NCCL nothing is compared.

    Args:
        peer: Global rank of the other end.
        group: Group that contains both ranks.
        verb: ``send`` or ``recv``.
        what: Description of the tensor that is sent or expected.
        problem: Reason why this rank can't continue. It is raised here and reported to the other
            rank.

    Raises:
        MismatchError: The other rank's call does not match, or it has a problem.
    """
    if group.backend is Backend.NCCL:
        if problem is not None:
            raise problem
        return
    line = f"{verb} {'to' if verb == 'send' else 'from'} rank {peer} of {what}|{verb}|{what}"
    peer_line = exchange_with(peer, group, line if problem is None else f"{_REFUSED}{problem}")
    if problem is not None:
        raise problem
    this_rank = group.ranks[group.rank]
    if peer_line.startswith(_REFUSED):
        raise MismatchError(f"rank {peer} refused its call: {peer_line.removeprefix(_REFUSED)}")
    _, peer_verb, peer_what = peer_line.split("|")
    if peer_verb == verb:
        raise MismatchError(
            f"ranks {this_rank} and {peer} both {verb}: one must send, the other recv"
        )
    if peer_what != what:
        raise MismatchError(
            f"rank {this_rank} calls {verb} with {what}, but rank {peer} calls {peer_verb} with "
            f"{peer_what}: give both the same shape and dtype"
        )


def check_same(ranks: tuple[int, ...], lines: list[str]) -> None:
    """Check that the lines of all ranks are the same and report no problem.

    Args:
        ranks: Global ranks of the group.
        lines: Line of each rank, by rank in the group; text after a ``|`` may differ.

    Raises:
        MismatchError: Names the ranks that differ and their calls, or the rank with a problem.
    """
    for rank, rank_line in zip(ranks, lines, strict=True):
        if rank_line.startswith(_REFUSED):
            raise MismatchError(f"rank {rank} refused its call: {rank_line.removeprefix(_REFUSED)}")
    heads = [rank_line.partition("|")[0] for rank_line in lines]
    if len(set(heads)) > 1:
        raise MismatchError(format_mismatch(ranks, dict(zip(ranks, heads, strict=True))))


def exchange(group: ProcessGroup, line: str) -> list[str]:
    """Return the line of every rank of a gloo or mock group, by rank in the group."""
    torch_group = group.torch_group
    if group.backend is Backend.MOCK:
        lines: list[str] = torch_group.exchange(line)  # type: ignore[attr-defined]
        return lines
    received = [torch.empty(LINE_BYTES, dtype=torch.uint8) for _ in group.ranks]
    dist.all_gather(received, pack(line), group=torch_group)
    return [unpack(tensor) for tensor in received]


def exchange_with(peer: int, group: ProcessGroup, line: str) -> str:
    """Exchange lines with another rank of a gloo or mock group; return its line."""
    torch_group = group.torch_group
    if group.backend is Backend.MOCK:
        peer_line: str = torch_group.exchange_with(peer, line)  # type: ignore[attr-defined]
        return peer_line
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
    """Encode a line in ``LINE_BYTES`` bytes; the end of a long line is replaced with its digest."""
    data = line.encode()
    if len(data) > LINE_BYTES:
        digest = hashlib.sha256(data).hexdigest()[:16].encode()
        data = data[: LINE_BYTES - len(digest) - 4] + b"... " + digest
    return torch.frombuffer(bytearray(data.ljust(LINE_BYTES, b"\0")), dtype=torch.uint8)


def unpack(tensor: torch.Tensor) -> str:
    """Decode a line from ``pack``."""
    return bytes(tensor.tolist()).rstrip(b"\0").decode(errors="replace")
