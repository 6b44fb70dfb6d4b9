"""Exceptions for failures between ranks, with a common base class.

A wrong argument on one rank is a plain ``ValueError`` or ``TypeError`` on that rank instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class CommError(RuntimeError):
    """Ranks failed to communicate."""


class MismatchError(CommError):
    """Ranks of a group made different calls, or the same call on different shapes or dtypes."""


class DeadlockError(CommError):
    """All remaining ranks wait for each other; the message names the operation of each rank."""


class NcclError(CommError, ValueError):
    """NCCL can't be used here as requested; the message gives the reason from ``nccl.status()``."""


class PeerFailedError(CommError):
    """A rank that this rank waited for has failed; the message names it."""


class UnreachableRankError(CommError):
    """The connection to a rank failed, or an unknown program took its place; names the rank."""


class RankFailedError(CommError):
    """A rank of a mock world failed; ``__cause__`` is its exception.

    Attributes:
        rank: The rank that failed first.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[int, str]]:
        return RankFailedError, (self.rank, str(self))


def format_tensor(tensor: Tensor) -> str:
    """Return dtype and shape as ``float32 [2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 1, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def format_mismatch(ranks: Sequence[int], calls_by_rank: Mapping[int, object]) -> str:
    """Return a message that lists which ranks of a group made which call.

    Args:
        ranks: Global ranks of the group.
        calls_by_rank: Call of each rank that has arrived.
    """
    ranks_by_call: dict[str, list[int]] = {}
    for rank in ranks:
        if rank in calls_by_rank:
            ranks_by_call.setdefault(str(calls_by_rank[rank]), []).append(rank)
    calls = "; ".join(f"{format_ranks(callers)}: {call}" for call, callers in ranks_by_call.items())
    return (
        f"ranks of group {list(ranks)} make different calls ({calls}); every rank of a group must "
        "make the same calls in the same order, on the same shapes and dtypes"
    )
