"""Runs a rank's process: signal handling, joining the world, training and exit status.

The process sends events to its parent, then a message about its end. ``training.worker`` does the
training.
"""

from __future__ import annotations

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

from axonlaunch import checkpoint, config as configuration
from axonlaunch.checkpoint.format import storage
from axonlaunch.comm import World
from axonlaunch.comm.connection.authenticated_store import AuthenticatedStore
from axonlaunch.comm.connection.rendezvous import RankEnvironment
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import num_ranks
from axonlaunch.events import Listener, Monitor, merge_finished
from axonlaunch.launch.failures import hang
from axonlaunch.launch.local.messages import Done, RankSpec
from axonlaunch.launch.local.rank_error import report_of
from axonlaunch.planning.memory.live_peak import CpuPeakMemory
from axonlaunch.system.processes import forkserver
from axonlaunch.system.processes.process_title import name_process
from axonlaunch.system.storage import files
from axonlaunch.system.text import streams
from axonlaunch.training import worker

_GRACE_S = 60.0
"""Seconds that torch waits longer than ``launch.timeout_s``. The supervisor should find a hang
first, because torch blames the rank that noticed it."""


def main(pickled: bytes, spec: RankSpec, connection: Connection) -> None:
    """Run a rank, or all ranks with the mock backend. This function never returns.

    Args:
        pickled: Pickled resolved configuration. User-defined classes that it names are imported
            here, so that the log receives their output and their errors are reported.
        spec: Description of this rank.
        connection: Receives events, then the message about the rank's end.
    """
    forkserver.lead_group()  # Ctrl-C reaches only the parent, which tells this process to stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    forkserver.become_independent()
    status = 1
    try:
        redirect(spec.log)
        config: RunConfig = pickle.loads(pickled)
        ranks = f"rank {spec.rank} of {spec.world_size}"
        if config.launch.backend == "mock":
            ranks = f"{num_ranks(config)} ranks"
        name_process(f"{ranks}, {config.name}")
        configuration.import_code(config)
        if spec.restarted and checkpoint.find_checkpoint(storage.root(config)) is not None:
            config = configuration.with_values(config, {"checkpoint.resume": "auto"})
        claim_cores(spec)
        train = partial(
            worker.run,
            config,
            monitor=monitor(spec, report=connection.send, stop=stop.is_set),
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
            # Not in a with statement, so that an error is reported before anything waits for peers.
            world = join_world(config, spec)
            finished = train(world)
            world.close()
        connection.send(Done(spec.rank, finished))
        status = 0
    except BaseException as error:
        connection.send(report_of(error, spec))
        time.sleep(0.05)  # Let the parent show the report and stop following the log.
        traceback.print_exception(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Skip interpreter teardown, which takes up to a second with torch loaded.
        os._exit(status)


def monitor(spec: RankSpec, *, report: Listener, stop: Callable[[], bool]) -> Monitor:
    """Return a monitor that writes heartbeats to the table which the parent reads."""
    return Monitor(
        report=report,
        report_phase=partial(spec.heartbeats.report_phase, spec.local_rank),
        stop=stop,
    )


def join_world(config: RunConfig, spec: RankSpec) -> World:
    """Join the world as the rank that the specification describes."""
    environment = RankEnvironment(
        rank=spec.rank,
        world_size=spec.world_size,
        local_rank=spec.local_rank,
        local_world_size=spec.local_world_size,
        master_addr=spec.master_addr,
        master_port=spec.port,
        is_single=False,
    )
    # For user code and libraries that read these variables; this package does not.
    os.environ.update(environment.variables())
    if config.train.deterministic:
        # NCCL reads these variables once. A ring sums in the order of its ranks. A reduction in the
        # network switch (NVLS) does not, and NCCL's tuner may choose differently in each run.
        # Source: NVIDIA, Megatron Core, "Deterministic Training", NCCL_ALGO.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("NCCL_ALGO", "Ring")
    timeout_s = config.launch.timeout_s + _GRACE_S
    return World.join(
        environment,
        backend=config.launch.backend,
        device=config.launch.device,
        timeout_s=timeout_s,
        store=_store(spec, timeout_s),
        # Pipeline stages exchange micro-batches in pairs, in both directions at the same time.
        connects_at_once=config.strategy.pipeline.degree == 1,
    )


def _store(spec: RankSpec, timeout_s: float) -> dist.Store:
    store = dist.TCPStore(
        spec.master_addr,
        spec.port,
        is_master=spec.listener is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=None if spec.listener is None else spec.listener.detach(),
    )
    keys = f"axonlaunch/{spec.credentials.run}/{spec.credentials.round}/ranks"
    return AuthenticatedStore(dist.PrefixStore(keys, store), spec.credentials)


def redirect(log: Path) -> None:
    """Redirect output of Python and C code to the rank's log, and write stacks there on request."""
    try:
        target = files.appending_descriptor(log)
    except OSError:
        streams.silence(1, 2)  # the parent shows the error
        raise
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(target, number)
    os.close(target)
    sys.stdout = streams.tolerant(os.fdopen(1, "w", buffering=1, closefd=False))
    sys.stderr = streams.tolerant(os.fdopen(2, "w", buffering=1, closefd=False))
    faulthandler.enable()
    _write_stacks_on_signal(log)


def _write_stacks_on_signal(log: Path) -> None:
    """Write stacks and torch's record of collectives to the log on each ``hang.SIGNAL``.

    The main thread may hang in C code, where Python's signal handlers do not run. Therefore
    ``faulthandler`` writes the stacks from its C handler, and a thread writes the record when the
    signal arrives on the wakeup file descriptor.
    """
    signal.signal(hang.SIGNAL, lambda number, frame: None)
    faulthandler.register(hang.SIGNAL, all_threads=True, chain=True)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def record() -> None:
        while numbers := os.read(reader, 64):
            if hang.SIGNAL in numbers:
                hang.write(log)

    threading.Thread(target=record, name="flight record", daemon=True).start()


def claim_cores(spec: RankSpec) -> None:
    """Pin this process to its cores and set its number of threads."""
    if spec.cores is not None:
        os.sched_setaffinity(0, spec.cores)
    torch.set_num_threads(spec.threads)
