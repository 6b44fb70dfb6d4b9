"""What a rank thread holds of an operation that is not done yet: torch's ``Work``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from axonlaunch.comm.mock.exchange import PendingMessage, PendingOperation
from axonlaunch.comm.mock.turn_scheduler import TurnScheduler


class MockWork(dist.Work):
    """What a rank gets for an asynchronous operation."""

    def __init__(
        self,
        baton: TurnScheduler,
        rank: int,
        errands: Sequence[PendingOperation],
        *,
        result: Any,
        ranks: Sequence[int],
    ) -> None:
        super().__init__()
        self._baton, self._rank = baton, rank
        self._errands, self._result, self._ranks = errands, result, ranks

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        """Let other ranks run until the operation is done; the world's own time limit holds."""
        for errand in self._errands:
            self._baton.wait(self._rank, errand)
            errand.raise_if_failed()
        return True

    def is_completed(self) -> bool:
        """Say whether it is done, after a turn for each rank that could bring it about."""
        if not all(errand.done for errand in self._errands):
            self._baton.pause(self._rank)
        return all(errand.done for errand in self._errands)

    def get_future(self) -> Future[Any]:
        """Wait, then return a completed future: C++ waits for it while it holds the baton."""
        self.wait()
        future = self._baton.device.future()
        future.set_result(self._result)
        return future

    def result(self) -> Any:
        """Return the tensors that the operation fills."""
        return self._result

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def _source_rank(self) -> int:
        letter = self._errands[0]
        assert isinstance(letter, PendingMessage)
        assert letter.source is not None
        return self._ranks.index(letter.source)

    source_rank = _source_rank
