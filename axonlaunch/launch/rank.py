"""The process of a rank, from its first line to its last: surroundings, work, verdict.

It sends the parent events, then how it ended. What a rank computes is ``worker``'s.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from axonlaunch import config as configuration
from axonlaunch import worker
from axonlaunch.comm import RankFailedError, World
from axonlaunch.comm.rendezvous import local_place
from axonlaunch.config import RunConfig
from axonlaunch.events import Finished, of_all_ranks
from axonlaunch.launch import forkserver
from axonlaunch.launch.rank_messages import Done, Failure, Place


def main(run_dir: Path, place: Place, connection: Connection) -> None:
    """Be a rank, or under the mock backend all of them; never returns."""
    forkserver.lead_group()  # Ctrl-C reaches the parent alone, which tells us to stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _redirect(place.log)
    faulthandler.enable()
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    status = 1
    try:
        config = configuration.read(run_dir)
        _claim_cores(place)
        finished = _work(config, place, connection, asked.is_set)
        connection.send(Done(place.rank, finished))
        status = 0
    except BaseException as error:
        connection.send(_failure(place.rank, error))
        time.sleep(0.05)  # the parent shows it, and follows the log no further
        traceback.print_exception(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Interpreter teardown with torch loaded takes up to a second, and has nothing left to do.
        os._exit(status)


def _work(
    config: RunConfig, place: Place, connection: Connection, stop: Callable[[], bool]
) -> Finished:
    def in_world(world: World) -> Finished:
        return worker.run(config, world, report=connection.send, stop=stop)

    if config.launch.backend == "mock":
        assert config.launch.nproc != "auto"
        mock = World.mock(config.launch.nproc, timeout_s=config.launch.timeout_s)
        return of_all_ranks(mock.run(in_world))
    os.environ.update(local_place(place.rank, place.world_size, port=place.port))
    with World.init(
        backend=config.launch.backend,
        timeout_s=config.launch.timeout_s,
        store=_store(place, config.launch.timeout_s),
    ) as world:
        return in_world(world)


def _store(place: Place, timeout_s: float) -> dist.Store:
    from datetime import timedelta

    return dist.TCPStore(
        "127.0.0.1",
        place.port,
        place.world_size,
        is_master=place.listener is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=None if place.listener is None else place.listener.detach(),
    )


def _redirect(log: Path) -> None:
    """Send what Python and C code print to the rank's log."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(target, number)
    os.close(target)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _claim_cores(place: Place) -> None:
    if place.cores is not None:
        os.sched_setaffinity(0, place.cores)
    torch.set_num_threads(place.threads)


def _failure(rank: int, error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    if isinstance(error, RankFailedError):
        rank, error = error.rank, error.__cause__ or error
    message = str(error).strip() or type(error).__name__
    return Failure(rank, type(error).__name__, message, text, _is_connection(error))


def _is_connection(error: BaseException) -> bool:
    """Tell an error that a lost peer causes from one of this rank's own."""
    words = (
        "connection closed",
        "connection reset",
        "connection refused",
        "broken pipe",
        "timed out",
    )
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
