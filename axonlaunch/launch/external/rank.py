"""Runs this process as one rank of a world started by torchrun, mpirun, srun or a user.

Rank 0 composes, checks and freezes the configuration; the other ranks read it from torch's store. A
thread of each rank watches the others, and that of rank 0 reports the end of the run.
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
from axonlaunch.config.consistency.layout import frozen_threads
from axonlaunch.config.options.launch import LaunchConfig
from axonlaunch.config.problems.errors import exit_status
from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
from axonlaunch.launch.environment.launcher_process import LauncherProcess
from axonlaunch.launch.external.join_ranks import (
    frozen_by_rank_0,
    join_ranks,
    message_key,
    with_node_counts,
)
from axonlaunch.launch.external.watch import JobWatch
from axonlaunch.launch.failures.outcome import Outcome
from axonlaunch.launch.failures.report import Crash
from axonlaunch.launch.local import rank_process
from axonlaunch.launch.local.heartbeat import HeartbeatTable
from axonlaunch.launch.local.messages import RankSpec
from axonlaunch.launch.local.rank_error import report_of
from axonlaunch.launch.multinode.coordination import Coordinator
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.launch.output.summary import RunRecorder, finish_run, log_event, log_of
from axonlaunch.launch.run_folder import finished_runs
from axonlaunch.launch.run_folder.open_folder import open_run_dir
from axonlaunch.planning.background_estimate import BackgroundEstimate
from axonlaunch.planning.memory.live_peak import CpuPeakMemory
from axonlaunch.preflight import checks
from axonlaunch.system.text.streams import tolerant
from axonlaunch.training import worker
from axonlaunch.verification.proofs.runner import prove_layout
from axonlaunch.verification.result import Proof

RANK_LOST_S = 20.0
"""Seconds of silence after which a rank is lost. Its watching thread shares the interpreter with
training, so a short silence is normal. A launcher notices the end of a process immediately."""


def main(
    environment: ClusterEnvironment,
    resolve: Callable[[ClusterEnvironment], tuple[Composed, RunConfig]],
    *,
    launch: LaunchConfig,
    launcher: LauncherProcess,
    started: float,
    as_json: bool = False,
) -> tuple[int, dict[str, Any] | None]:
    """Run this process as a rank.

    Args:
        environment: Environment that describes this rank.
        resolve: Composes and resolves the configuration on rank 0.
        launch: Launch configuration with the settings of the token.
        launcher: Launcher that started this process, which is watched.
        started: ``time.time()`` at the start of the command.
        as_json: Whether standard output is reserved for JSON.

    Returns:
        The exit status and, on rank 0, the content of ``summary.json``; that of an earlier launch
        if the run was already finished. If the run fails, the process ends instead.

    Raises:
        ConfigError: The ranks can't meet, or (only on rank 0) the configuration can't be run.
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

            def resolve_here() -> tuple[Composed, RunConfig]:
                return resolve(with_node_counts(environment, members))

            begun = _begin_run(peers, resolve_here, folder, launcher, as_json=as_json)
            if isinstance(begun, dict):
                return 0, begun
            config, proof = begun
            hosts = [member["host"] for member in members or ()]
            log_event(config, "nodes", {"hosts": list(dict.fromkeys(hosts))})
            peers.publish("frozen", {"config": configuration.to_yaml(config)})
        else:
            frozen = frozen_by_rank_0(peers)
            if isinstance(frozen, int):
                return frozen, None
            config = frozen
        return _run(config, environment, peers, launcher, proof, started=started, as_json=as_json)


def _begin_run(
    peers: Coordinator,
    resolve: Callable[[], tuple[Composed, RunConfig]],
    folder: ExitStack,
    launcher: LauncherProcess,
    *,
    as_json: bool,
) -> tuple[RunConfig, Proof | None] | dict[str, Any]:
    """Resolve the configuration, prove its layout and open the run folder, on rank 0.

    If the run is already finished or can't be run, the other ranks are told to end.

    Args:
        peers: Channel to the other ranks, which wait as long as this rank lives.
        resolve: Composes and resolves the configuration.
        folder: Closes the run folder at the end of the run.
        launcher: Launcher that started this process.
        as_json: Whether standard output is reserved for JSON.

    Returns:
        The frozen configuration and the proof, or the summary of a run that was already finished.

    Raises:
        ConfigError: The configuration can't be run.
    """
    proof = None
    try:
        with peers.preparing():  # no rank uses a device yet
            composed, resolved = resolve()
            summary = finished_runs.finished_summary(resolved)
            if summary is None:
                proof = prove_layout(multiprocessing.get_context("spawn"), resolved)
        if summary is not None:
            peers.call_off({"status": 0})
            text = finished_runs.finished_text(resolved, summary)
            print(text, file=sys.stderr if as_json else sys.stdout)
            return summary
        announce = partial(print, file=sys.stderr)
        if proof is not None:
            announce(proof)
        opened = open_run_dir(
            resolved,
            announce=announce,
            composed=composed,
            sharing=_sharing(resolved),
            launched_by=launcher.identity.name,
        )
        return folder.enter_context(opened), proof
    except ConfigError as error:
        peers.call_off({"status": exit_status(error.problems)})
        raise


def fetch_for_node(config: RunConfig, environment: ClusterEnvironment) -> None:
    """Download the model and the data of the Hub to this node, by the first rank of the node.

    Rank 0 has downloaded them to its node before it froze the configuration. The other ranks of a
    node need no barrier, because joining the world waits for all ranks.

    Raises:
        ConfigError: The model or the data can't be downloaded.
    """
    if environment.rank == 0 or environment.local_rank != 0:
        return
    checks.fetch_model_and_data(config)


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
    """Run the rank with the frozen configuration; return the same as ``main``."""
    output, errors = os.dup(1), os.dup(2)
    spec = _rank_spec(config, environment, peers)
    rank_process.redirect(spec.log)
    stream = tolerant(os.fdopen(errors if as_json else output, "w", buffering=1))
    console = RunConsole(stream=stream, is_plain=True)
    record = RunRecorder(started, console, proof=proof)
    # Spawned, because this process has threads and a device and can't be forked.
    record.prediction = BackgroundEstimate(multiprocessing.get_context("spawn"), config)
    stop_request = _StopRequest()
    peers.watch()
    error_stream = tolerant(os.fdopen(errors, "w", buffering=1)) if not as_json else stream
    watch = JobWatch(config, spec, peers, launcher, record, console, error_stream)
    watch.start()
    monitor = rank_process.monitor(
        spec, report=record if environment.rank == 0 else _ignore, stop=stop_request.is_set
    )
    try:
        fetch_for_node(config, environment)
        rank_process.claim_cores(spec)
        # Not in a with statement, so that an error is reported before anything waits for peers.
        world = rank_process.join_world(config, spec)
        finished = worker.run(config, world, monitor=monitor, cpu_peak=CpuPeakMemory)
        world.close()
    except BaseException as error:
        peers.report(report_of(error, spec))
        traceback.print_exception(error)
        threading.Event().wait()  # the watching thread ends the process
        raise AssertionError("unreachable") from error
    everyone = peers.finish([finished])
    if isinstance(everyone, Crash):
        threading.Event().wait()
    watch.end()
    for saved, standard in ((output, 1), (errors, 2)):
        os.dup2(saved, standard)  # further output goes to the terminal again, not to the log
    status = 130 if finished.interrupted else 0
    if environment.rank:
        return status, None
    assert not isinstance(everyone, Crash)
    from axonlaunch.events import merge_finished

    with closing(record.prediction):
        return finish_run(config, Outcome(finished=merge_finished(everyone)), record, console)


def _rank_spec(config: RunConfig, environment: ClusterEnvironment, peers: Coordinator) -> RankSpec:
    """Return the specification of this rank from its launcher's environment."""
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
        credentials=peers.channel.credentials.with_sender(f"rank {environment.rank}"),
        listener=None,
        log=log_of(config, environment.rank),
        heartbeats=HeartbeatTable.of(config.launch.nproc),
        threads=frozen_threads(config),
        cores=None,  # the launcher has chosen the cores
    )


def _sharing(config: RunConfig) -> int:
    """Return the number of ranks that share the cores available to this process."""
    assert config.launch.nproc != "auto"
    allowed, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return config.launch.nproc if allowed == all_cores else 1


def _ignore(event: object) -> None:
    del event


class _StopRequest:
    """Records a stop signal. A second signal more than a second later ends the process immediately.

    An earlier second signal is ignored, because a launcher may forward the one that the terminal
    has already sent.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def is_set(self) -> bool:
        return self._first is not None

    def _on_signal(self, number: int, frame: object) -> None:
        del number, frame
        now = time.monotonic()
        if self._first is not None and now - self._first > 1.0:
            os._exit(130)
        self._first = self._first or now
