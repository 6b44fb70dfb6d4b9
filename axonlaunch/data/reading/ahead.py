"""Loads batches ahead in a thread, also those that worker processes read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

_Batch = TypeVar("_Batch")


class Workers(Protocol):
    """Worker processes that read batches while a thread of this process waits for them.

    ``data.reading.processes`` implements it.
    """

    def wait(self, result: Future[_Batch]) -> _Batch:
        """Return the result of a load, or raise an error if a process hangs."""

    def stop(self) -> bool:
        """End a waiting load; return whether it ends at once."""

    def close(self) -> None:
        """End the processes; called in the thread."""


def load_ahead(
    loads: Iterator[Callable[[], _Batch]], *, ahead: int, workers: Workers | None = None
) -> Generator[_Batch]:
    """Call functions in a thread, while the caller works, and yield their results in order.

    An exception of a function is raised when its result is due. Closing the generator ends the
    thread and the processes. If processes had to be killed, the thread ends a few seconds later,
    when torch notices.

    Args:
        ahead: Number of results that are loaded ahead.
        workers: Processes that the functions wait for.
    """
    wait = Future[_Batch].result if workers is None else workers.wait
    loading: deque[Future[_Batch]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
    ends_at_once = True
    try:
        for load in loads:
            loading.append(pool.submit(load))
            if len(loading) > ahead:
                yield wait(loading.popleft())
        while loading:
            yield wait(loading.popleft())
    finally:
        if workers is not None:
            for future in loading:
                future.cancel()
            ends_at_once = workers.stop()
            pool.submit(workers.close)
        pool.shutdown(wait=ends_at_once, cancel_futures=workers is None)
