"""What can go wrong between ranks: one tree of exceptions, so that a caller can catch it whole.

A wrong argument on one rank is a plain ``ValueError`` or ``TypeError`` there, not one of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class CommError(RuntimeError):
    """Ranks could not do together what they were asked to do."""


class MismatchError(CommError):
    """Ranks of one group made different calls, or the same call on different shapes or dtypes."""


class DeadlockError(CommError):
    """Every rank that is left waits for another; the message says which for what."""


class NcclError(CommError, ValueError):
    """NCCL can't be used here as asked; the message says why, as ``nccl.status()`` does."""


class PeerFailedError(CommError):
    """This rank waited for a rank that failed, which the message names."""


class UnreachableRankError(CommError):
    """A rank could not be connected with, or a stranger is in its place; the message says which."""


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


def say_tensor(tensor: Tensor) -> str:
    """Write ``float32 [2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def say_ranks(ranks: Sequence[int]) -> str:
    """Write ``rank 3`` or ``ranks 1, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def say_mismatch(ranks: Sequence[int], said: Mapping[int, object]) -> str:
    """Write which ranks of a group asked for what."""
    askers: dict[str, list[int]] = {}
    for rank in ranks:
        if rank in said:
            askers.setdefault(str(said[rank]), []).append(rank)
    calls = "; ".join(f"{say_ranks(who)}: {what}" for what, who in askers.items())
    return (
        f"ranks of group {list(ranks)} make different calls ({calls}); every rank of a group must "
        "make the same calls in the same order, on the same shapes and dtypes"
    )
