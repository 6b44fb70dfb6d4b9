"""A world of rank threads in one process: real collectives, one rank running at a time.

There is no network and no second process. On a CPU, a run gives the same bits every time. On a GPU,
all ranks compute on the same device. Ranks share everything that is global in a process:
``os.environ``, the default dtype, module state, and the random state of ``random`` and NumPy. The
states of torch's generators are separate for each rank.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
import torch.distributed as dist

# Its functions store the current default group as the default of an argument at import, so it must
# not be imported by a rank first.
import torch.distributed.nn.functional

from axonlaunch.comm.backend import Backend
from axonlaunch.comm.errors import CommError, RankFailedError
from axonlaunch.comm.mock.exchange import Exchange, here
from axonlaunch.comm.mock.process_group import MockProcessGroup
from axonlaunch.comm.mock.shared_device import SharedDevice
from axonlaunch.comm.mock.store import MockStore
from axonlaunch.comm.mock.torch_internals import forget_meshes_of_thread, isolated_threads
from axonlaunch.comm.mock.turn_scheduler import TurnScheduler

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")
"""World of one rank: ``comm.World`` or a subclass."""

_one_at_a_time = threading.Lock()


class MockWorld(Generic[W]):
    """A world with threads as ranks; ``run`` calls a function on each of them.

    Attributes:
        world_size: Number of ranks.
        timeout_s: Maximum time in seconds that a rank may compute without communicating.
        device: Device on which all ranks compute.
    """

    def __init__(
        self,
        world_size: int,
        *,
        join: Callable[..., W],
        timeout_s: float = 60.0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Describe the world; users call ``World.mock`` instead.

        Args:
            world_size: Number of ranks.
            join: Creates a rank's world on its default process group: ``World``.
            timeout_s: Maximum time in seconds that a rank may compute without communicating.
            device: ``cpu``, or ``cuda`` for one GPU that all ranks share.

        Raises:
            ValueError: ``world_size`` or ``timeout_s`` is not positive, or the device does not
                exist.
        """
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: a world has at least one rank")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: must be more than 0 seconds")
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device={device}: ranks compute on cpu or cuda; use one of them")
        if self.device.type == "cuda" and not torch.accelerator.is_available():
            raise ValueError(f"device={device}: torch sees no GPU here; use cpu")
        self._make_world = join

    def run(self, fn: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call ``fn(world, *args, **kwargs)`` on every rank and return the results by rank.

        Every rank starts with the current states of torch's random generators. Afterwards the
        states are restored.

        Raises:
            RankFailedError: A rank raised an exception or exceeded ``timeout_s``, or all ranks
                waited for each other. ``rank`` is the first such rank, and ``__cause__`` is its
                exception.
            CommError: A mock world is already running in this process.
        """
        if not _one_at_a_time.acquire(blocking=False):
            raise CommError(
                "a mock world is already running in this process: they share torch's state, so "
                "run one after another"
            )
        try:
            shared = SharedDevice(self.device)
            random_states = shared.random_states()
            try:
                with isolated_threads():
                    return self._run(lambda world: fn(world, *args, **kwargs), shared)
            finally:
                shared.set_random_states(random_states)
        finally:
            _one_at_a_time.release()

    def _run(self, fn: Callable[[W], R], shared: SharedDevice) -> list[R]:
        turns = TurnScheduler(self.world_size, timeout_s=self.timeout_s, device=shared)
        exchange = Exchange(turns)
        store = MockStore(exchange)
        results: dict[int, R] = {}
        isolated = True

        def be_rank(rank: int) -> None:
            error: BaseException | None = None
            try:
                turns.enter(rank)
                shared.enter()
                here.exchange, here.rank = exchange, rank
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = fn(self._join(rank, store, shared.device))
            except BaseException as raised:
                error = raised
            try:
                if isolated and dist.is_initialized():
                    dist.destroy_process_group()
                forget_meshes_of_thread()
            except BaseException as raised:
                error = error or raised
            finally:
                turns.leave(rank, error)

        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(be_rank, rank),
                name=f"mock-rank-{rank}",
                daemon=True,
            )
            for rank in range(self.world_size)
        ]
        try:
            for rank, thread in enumerate(threads):
                try:
                    thread.start()
                except RuntimeError as error:  # the system can't create more threads
                    turns.call_off(error, num_started=rank)
                    break
            turns.supervise()
        finally:
            turns.join()
            isolated = False
        if turns.failure is not None:
            culprit, cause = turns.failure
            raise RankFailedError(
                culprit, f"rank {culprit} failed: {type(cause).__name__}: {cause}"
            ) from cause
        return [results[rank] for rank in range(self.world_size)]

    def _join(self, rank: int, store: dist.Store, device: torch.device) -> W:
        """Create this thread's default process group and its world."""
        timeout = timedelta(seconds=self.timeout_s)
        dist.init_process_group(
            Backend.MOCK.value,
            store=store,
            rank=rank,
            world_size=self.world_size,
            timeout=timeout,
        )
        return self._make_world(
            rank=rank,
            local_rank=rank,
            world_size=self.world_size,
            device=device,
            backend=Backend.MOCK,
            timeout_s=self.timeout_s,
        )


def _create_group(options: Any, _: Any) -> MockProcessGroup:
    """Create this rank's end of a group; called by ``init_process_group`` and ``new_group``."""
    ranks = options.global_ranks_in_group or range(options.group_size)
    return MockProcessGroup(
        options.group_rank, options.group_size, ranks=ranks, name=options.group_id
    )


dist.Backend.register_backend(
    Backend.MOCK.value, _create_group, extended_api=True, devices=["cpu", "cuda"]
)
