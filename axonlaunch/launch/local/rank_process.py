"""The process of a rank, from its first line to its last: signals, world, work, exit status.

It sends the parent events, then how it ended. What a rank computes is ``worker``'s.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from axonlaunch import checkpoint
from axonlaunch import config as configuration
from axonlaunch.checkpoint import storage
from axonlaunch.checkpoint.saver import SaveError
from axonlaunch.comm import RankFailedError, World
from axonlaunch.comm.authenticated_store import AuthenticatedStore
from axonlaunch.comm.errors import UnreachableRankError
from axonlaunch.comm.rendezvous import RankEnvironment
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.layout import num_ranks
from axonlaunch.diagnostics.out_of_memory import is_out_of_memory
from axonlaunch.events import Listener, Monitor, merge_finished
from axonlaunch.launch.failures import hang
from axonlaunch.launch.failures.report import Report, cause_of, plain_error, report_of_rank
from axonlaunch.launch.local.messages import Done, RankSpec
from axonlaunch.planning.memory.live_peak import CpuPeakMemory
from axonlaunch.system import files, forkserver, streams
from axonlaunch.system.authentication import ForgedMessageError
from axonlaunch.training import worker
from axonlaunch.training.nonfinite import NotFiniteError
from axonlaunch.training.peak_memory import available_bytes

_GRACE_S = 60.0
"""How much longer than ``launch.timeout_s`` torch waits: who watches the ranks is to find a hang
first, for torch blames whoever noticed it."""


# Their messages say it all, without a traceback.
_PLAIN = (
    checkpoint.CorruptCheckpointError,
    SaveError,
    NotFiniteError,
    ConfigError,
    ForgedMessageError,
    UnreachableRankError,
)


_OF_TYPES = ("same dtype", "scalar type", "should be the same")
"""What torch's operations say of tensors that are not of one type."""


def main(pickled: bytes, place: RankSpec, connection: Connection) -> None:
    """Be a rank, or under the mock backend all of them; never returns.

    Args:
        pickled: The resolved configuration. It may name a user's classes, whose import is a rank's
            work: what it prints is in the log, and what it raises is reported.
        place: Which rank this is.
        connection: Takes events, then how the rank ended.
    """
    forkserver.lead_group()  # Ctrl-C reaches the parent alone, which asks us to stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    forkserver.become_independent()
    status = 1
    try:
        redirect(place.log)
        config: RunConfig = pickle.loads(pickled)
        configuration.import_code(config)
        if place.restarted and checkpoint.find_checkpoint(storage.root(config)) is not None:
            config = configuration.with_values(config, {"checkpoint.resume": "auto"})
        claim_cores(place)
        train = partial(
            worker.run,
            config,
            monitor=monitor(place, report=connection.send, stop=asked.is_set),
            cpu_peak=CpuPeakMemory,
        )
        if config.launch.backend == "mock":
            mock = World.mock(
                num_ranks(config),
                timeout_s=config.launch.timeout_s,
                device=config.launch.device,
            )
            finished = merge_finished(mock.run(train))
        else:
            # Not in a with statement: an error is reported before anything waits for the peers.
            world = join_world(config, place)
            finished = train(world)
            world.close()
        connection.send(Done(place.rank, finished))
        status = 0
    except BaseException as error:
        connection.send(report_of(error, place))
        time.sleep(0.05)  # the parent shows it, and follows the log no further
        traceback.print_exception(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Interpreter teardown with torch loaded takes up to a second, and has nothing left to do.
        os._exit(status)


def monitor(place: RankSpec, *, report: Listener, stop: Callable[[], bool]) -> Monitor:
    """Return what follows a rank whose heartbeats go where its parent reads them."""
    return Monitor(
        report=report,
        report_phase=partial(place.heartbeats.report_phase, place.local_rank),
        stop=stop,
    )


def join_world(config: RunConfig, place: RankSpec) -> World:
    """Join the world as the rank that this process was started as."""
    environment = RankEnvironment(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        master_addr=place.master_addr,
        master_port=place.port,
        alone=False,
    )
    # A user's code, and libraries, look for them there; nothing of ours does.
    os.environ.update(environment.variables())
    if config.train.deterministic:
        # NCCL reads them once. A ring adds up in the order of its ranks; a switch that adds up what
        # passes through it does not, and which of the two is faster NCCL's tuner decides again.
        # Source: NVIDIA, Megatron Core, "Deterministic Training", NCCL_ALGO.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("NCCL_ALGO", "Ring")
    waits_s = config.launch.timeout_s + _GRACE_S
    return World.join(
        environment,
        backend=config.launch.backend,
        device=config.launch.device,
        timeout_s=waits_s,
        store=_store(place, waits_s),
        # Micro-batches pass between pairs of stages in both directions at a time.
        connects_at_once=config.strategy.pipeline.degree == 1,
    )


def _store(place: RankSpec, timeout_s: float) -> dist.Store:
    store = dist.TCPStore(
        place.master_addr,
        place.port,
        is_master=place.listener is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=None if place.listener is None else place.listener.detach(),
    )
    keys = f"axonlaunch/{place.credentials.run}/{place.credentials.round}/ranks"
    return AuthenticatedStore(dist.PrefixStore(keys, store), place.credentials)


def redirect(log: Path) -> None:
    """Send what Python and C code print to the rank's log, and stacks when they are asked for."""
    try:
        target = files.appending_descriptor(log)
    except OSError:
        streams.silence(1, 2)  # what is said of it is the parent's to show
        raise
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(target, number)
    os.close(target)
    sys.stdout = streams.tolerant(os.fdopen(1, "w", buffering=1, closefd=False))
    sys.stderr = streams.tolerant(os.fdopen(2, "w", buffering=1, closefd=False))
    faulthandler.enable()
    _answer(log)


def _answer(log: Path) -> None:
    """Write stacks, and what torch recorded of collectives, on each ``stacks.SIGNAL``.

    The main thread may wait in C code for ever, where no handler of Python's runs: stacks are
    written by the signal's own, and a thread learns of it by the file that wakes event loops.
    """
    signal.signal(hang.SIGNAL, lambda number, frame: None)
    faulthandler.register(hang.SIGNAL, all_threads=True, chain=True)
    come, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def record() -> None:
        while numbers := os.read(come, 64):
            if hang.SIGNAL in numbers:
                hang.write(log)

    threading.Thread(target=record, name="flight record", daemon=True).start()


def claim_cores(place: RankSpec) -> None:
    """Take this rank's share of the node's cores."""
    if place.cores is not None:
        os.sched_setaffinity(0, place.cores)
    torch.set_num_threads(place.threads)


def report_of(error: BaseException, place: RankSpec) -> Report:
    """Describe an exception that ends this rank."""
    text: str | None = "".join(traceback.format_exception(error))
    rank = place.rank
    if isinstance(error, RankFailedError):
        rank, error = error.rank, error.__cause__ or error
    if isinstance(error, _PLAIN):
        text = None
    reason = f"{type(error).__name__}: {str(error).strip() or type(error).__name__}"
    cause = _cause(error)
    if gone := _find_deleted(error, place.log.parents[1]):
        reason, cause = f"{gone} is gone", "folder"
    elif isinstance(error, OSError) and cause:
        reason = plain_error(error)
    if cause in ("disk", "files", "folder"):
        text = None
    heartbeat = place.heartbeats.read(place.local_rank)
    report = report_of_rank(
        rank,
        "connection" if _is_connection(error) else "error",
        reason,
        log=place.log,
        step=heartbeat.step,
        doing=heartbeat.phase,
    )
    return dataclasses.replace(
        report,
        traceback=text,
        log="" if cause == "folder" else report.log,
        cause=cause,
        memory_bytes=available_bytes(place.local_world_size) if is_out_of_memory(error) else None,
    )


def _find_deleted(error: BaseException, run_folder: Path) -> str:
    """Name what was deleted under the run and so caused an error; empty for another error."""
    if not isinstance(error, OSError | SaveError):
        return ""
    if not (run_folder / "logs").is_dir():
        return f"the run folder {run_folder}"
    file = Path(str(getattr(error, "filename", "")))
    is_missing = isinstance(error, FileNotFoundError) and run_folder in file.parents
    return str(file) if is_missing else ""


def _cause(error: BaseException) -> str:
    """Name the known cause of an error, by which the report chooses its advice."""
    text = str(error).lower()
    if is_out_of_memory(error):
        return "memory"
    if cause := cause_of(error):
        return cause
    if isinstance(error, NotFiniteError):
        return "loss"
    if isinstance(error, ModuleNotFoundError):
        return f"module {error.name}"
    if isinstance(error, ConnectionRefusedError) or "connection refused" in text:
        return "refused"
    if "bfloat16" in text and any(words in text for words in _OF_TYPES):
        return "types"
    return ""


def _is_connection(error: BaseException) -> bool:
    """Return whether an error is due to a lost peer rather than to this rank."""
    if isinstance(error, UnreachableRankError):
        return False  # nobody failed before it
    if isinstance(error, dist.DistNetworkError | ConnectionError):
        return True
    # NCCL raises DistBackendError for failures of its own as well: two ranks on one device, a full
    # /dev/shm, an interface that is not there. Only its text says which it is.
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _LOST_PEER)


_LOST_PEER = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "socket closed",
    "remote process exited",
    "ncclremoteerror",
    "remote error",
)
