"""This process as one rank of a world that others started: torchrun, mpirun, srun or a person.

It starts no rank. Rank 0 composes, checks and freezes the configuration; the others take it from
torch's store. A thread of each watches the others, and rank 0's reports how the run ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from axonlaunch import config as configuration
from axonlaunch.config import Composed, ConfigError, RunConfig
from axonlaunch.config.launch import LaunchConfig
from axonlaunch.config.layout import frozen_threads
from axonlaunch.launch import run_dir
from axonlaunch.launch.cluster_environment import ClusterEnvironment
from axonlaunch.launch.external.joining import (
    frozen_by_rank_0,
    join_ranks,
    message_key,
    with_node_counts,
)
from axonlaunch.launch.external.launcher_process import LauncherProcess
from axonlaunch.launch.external.watch import JobWatch
from axonlaunch.launch.failures.outcome import Outcome
from axonlaunch.launch.failures.report import Crash
from axonlaunch.launch.local import rank_process
from axonlaunch.launch.local.heartbeat import HeartbeatTable
from axonlaunch.launch.local.messages import RankSpec
from axonlaunch.launch.multinode.coordination import Coordinator
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.launch.output.summary import RunRecorder, finish_run, log_event, log_of
from axonlaunch.planning.background_estimate import BackgroundEstimate
from axonlaunch.planning.memory.live_peak import CpuPeakMemory
from axonlaunch.preflight import checks
from axonlaunch.system.streams import tolerant
from axonlaunch.training import worker
from axonlaunch.verification.result import Proof
from axonlaunch.verification.runner import prove_layout

RANK_LOST_S = 20.0
"""Seconds of silence after which a rank is lost. Its watching thread shares the interpreter with
training, so a short silence says nothing; a launcher notices a process that ended at once."""


def main(
    environment: ClusterEnvironment,
    resolve: Callable[[ClusterEnvironment], tuple[Composed, RunConfig]],
    *,
    launch: LaunchConfig,
    launcher: LauncherProcess,
    started: float,
    as_json: bool = False,
) -> tuple[int, dict[str, Any] | None]:
    """Be a rank.

    Args:
        environment: Which one.
        launch: What is said of the token.
        resolve: Makes the configuration as it is written, and resolved, on rank 0.
        launcher: What started it, watched.
        started: ``time.time()`` when the command began.
        as_json: Keep standard output free.

    Returns:
        The exit status and, on rank 0, what was written to ``summary.json``: now, or before where
        the run was finished. A run that fails ends the process instead.

    Raises:
        ConfigError: The ranks can't meet, or the configuration can't be run; rank 0 reports the
            latter.
    """
    assert environment.local_rank is not None
    channel, members, nonces = join_ranks(environment, message_key(environment, launch))
    peers = Coordinator(
        channel,
        nonces=nonces,
        member=environment.rank,
        members=environment.world_size,
        first_ranks=list(range(environment.world_size)),
        lost_s=RANK_LOST_S,
        are_nodes=False,
    )
    proof = None
    with ExitStack() as folder:
        if environment.rank == 0:
            try:
                composed, resolved = resolve(with_node_counts(environment, members))
                if (summary := run_dir.finished_summary(resolved)) is not None:
                    _launch_nothing(peers, status=0)
                    text = run_dir.finished_text(resolved, summary)
                    print(text, file=sys.stderr if as_json else sys.stdout)
                    return 0, summary
                announce = partial(print, file=sys.stderr)
                # The others wait for what this sends them; no device is held yet by any.
                proof = prove_layout(multiprocessing.get_context("spawn"), resolved)
                if proof is not None:
                    announce(proof)
                opened = run_dir.open_run_dir(
                    resolved,
                    announce=announce,
                    composed=composed,
                    sharing=_sharing(resolved),
                    launched_by=launcher.identity.name,
                )
                config = folder.enter_context(opened)
                named = [member["host"] for member in members or ()]
                log_event(config, "nodes", {"hosts": list(dict.fromkeys(named))})
            except ConfigError:
                _launch_nothing(peers, status=2)
                raise
            peers.publish("frozen", {"config": configuration.to_yaml(config)})
        else:
            frozen = frozen_by_rank_0(peers)
            if isinstance(frozen, int):
                return frozen, None
            config = frozen
        return _run(config, environment, peers, launcher, proof, started=started, as_json=as_json)


def fetch_for_node(config: RunConfig, environment: ClusterEnvironment) -> None:
    """Bring a model of the Hugging Face Hub to this node, by one of its ranks.

    Rank 0 brought it to its own before it froze the configuration. The others of the node find it
    there: no world is joined before all of its ranks come to that.

    Raises:
        ConfigError: It can't be fetched.
    """
    if environment.rank == 0 or environment.local_rank != 0:
        return
    if problems := checks.fetch_model(config, here=True):
        raise ConfigError(problems)


def _launch_nothing(peers: Coordinator, *, status: int) -> None:
    """Make the other ranks exit with a status before the run begins."""
    peers.publish("frozen", {"status": status})
    peers.watch()
    peers.leave()


def _run(
    config: RunConfig,
    environment: ClusterEnvironment,
    peers: Coordinator,
    launcher: LauncherProcess,
    proof: Proof | None,
    *,
    started: float,
    as_json: bool,
) -> tuple[int, dict[str, Any] | None]:
    """Be the rank from the frozen configuration on; return as ``main`` does."""
    output, errors = os.dup(1), os.dup(2)
    place = _place(config, environment, peers)
    rank_process.redirect(place.log)
    stream = tolerant(os.fdopen(errors if as_json else output, "w", buffering=1))
    console = RunConsole(stream=stream, is_plain=True)
    record = RunRecorder(started, console, proof=proof)
    # Not forked from this process, which has threads and a device.
    record.prediction = BackgroundEstimate(multiprocessing.get_context("spawn"), config)
    stop_request = _StopRequest()
    peers.watch()
    error_stream = tolerant(os.fdopen(errors, "w", buffering=1)) if not as_json else stream
    watch = JobWatch(config, place, peers, launcher, record, console, error_stream)
    watch.start()
    monitor = rank_process.monitor(
        place, report=record if environment.rank == 0 else _unshown, stop=stop_request.is_set
    )
    try:
        fetch_for_node(config, environment)
        rank_process.claim_cores(place)
        # Not in a with statement: an error is reported before anything waits for the peers.
        world = rank_process.join_world(config, place)
        finished = worker.run(config, world, monitor=monitor, cpu_peak=CpuPeakMemory)
        world.close()
    except BaseException as error:
        peers.report(rank_process.report_of(error, place))
        traceback.print_exception(error)
        threading.Event().wait()  # the watching thread ends the process
        raise AssertionError("unreachable") from error
    everyone = peers.finish([finished])
    if isinstance(everyone, Crash):
        threading.Event().wait()
    watch.end()
    for ours, theirs in ((output, 1), (errors, 2)):
        os.dup2(ours, theirs)  # what is still to be said is for who started this process
    status = 130 if finished.interrupted else 0
    if environment.rank:
        return status, None
    assert not isinstance(everyone, Crash)
    from axonlaunch.events import merge_finished

    with closing(record.prediction):
        return finish_run(config, Outcome(finished=merge_finished(everyone)), record, console)


def _place(config: RunConfig, environment: ClusterEnvironment, peers: Coordinator) -> RankSpec:
    """Return which rank this process is, as its launcher's environment says."""
    assert environment.local_rank is not None
    assert config.launch.nproc != "auto"
    assert environment.master_addr is not None
    assert environment.master_port is not None
    return RankSpec(
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        local_world_size=config.launch.nproc,
        master_addr=environment.master_addr,
        port=environment.master_port,
        credentials=peers.channel.credentials.of(f"rank {environment.rank}"),
        listener=None,
        log=log_of(config, environment.rank),
        heartbeats=HeartbeatTable.of(config.launch.nproc),
        threads=frozen_threads(config),
        cores=None,  # who started this process placed it
    )


def _sharing(config: RunConfig) -> int:
    """Return how many ranks share the cores that this process may use."""
    assert config.launch.nproc != "auto"
    allowed, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return config.launch.nproc if allowed == all_cores else 1


def _unshown(event: object) -> None:
    del event


class _StopRequest:
    """Whether this rank was asked to stop; asked again a second later, it ends at once.

    A launcher may pass on what the terminal sent already.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def is_set(self) -> bool:
        return self._first is not None

    def _note(self, number: int, frame: object) -> None:
        del number, frame
        now = time.monotonic()
        if self._first is not None and now - self._first > 1.0:
            os._exit(130)
        self._first = self._first or now
