"""torch's ``Work`` for an operation of a mock world that may not be finished yet."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from axonlaunch.comm.mock.exchange import PendingMessage, PendingOperation
from axonlaunch.comm.mock.output import Output
from axonlaunch.comm.mock.turn_scheduler import TurnScheduler


class MockWork(dist.Work):
    """Handle of a rank for an asynchronous operation."""

    def __init__(
        self,
        turns: TurnScheduler,
        rank: int,
        operations: Sequence[PendingOperation],
        *,
        result: Any,
        outputs: Sequence[Output],
        ranks: Sequence[int],
    ) -> None:
        super().__init__()
        self._turns, self._rank = turns, rank
        self._operations, self._result, self._ranks = operations, result, ranks
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        """Let other ranks run until the operation has finished; the world's time limit applies."""
        for operation in self._operations:
            self._turns.wait(self._rank, operation)
            operation.raise_if_failed()
        self._finish()
        return True

    def is_completed(self) -> bool:
        """Return whether the operation has finished, after giving each ready rank a turn."""
        if not all(operation.done for operation in self._operations):
            self._turns.pause(self._rank)
        done = all(operation.done for operation in self._operations)
        if done:
            self._finish()
        return done

    def get_future(self) -> Future[Any]:
        """Wait, then return a completed future, because C++ would wait for it without yielding."""
        self.wait()
        future = self._turns.device.future()
        future.set_result(self._result)
        return future

    def result(self) -> Any:
        """Return the tensors that the operation fills."""
        return self._result

    def synchronize(self) -> None:
        """Wait for the operation."""
        self.wait()

    def _finish(self) -> None:
        """Copy results to their tensors, which this rank may read from now on."""
        arrived = [output for output in self._outputs if output.finish()]
        if arrived:
            self._turns.device.wait()

    def _source_rank(self) -> int:
        message = self._operations[0]
        assert isinstance(message, PendingMessage)
        assert message.source is not None
        return self._ranks.index(message.source)

    source_rank = _source_rank
