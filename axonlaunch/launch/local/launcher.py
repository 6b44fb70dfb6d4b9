"""Launches the ranks of this node, with a reserved port, cores for each rank and a supervisor.

The parent imports torch only if the run has other nodes. All other work with torch is done in
processes forked from the warm server.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from typing import Any

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.consistency.layout import frozen_threads, num_ranks
from axonlaunch.config.problems.errors import gathering
from axonlaunch.launch.failures.outcome import Outcome
from axonlaunch.launch.failures.report import report_of_system
from axonlaunch.launch.launcher import LaunchOptions
from axonlaunch.launch.local.heartbeat import HeartbeatTable
from axonlaunch.launch.local.messages import RankSpec
from axonlaunch.launch.local.supervisor import Rank, RemoteNodes, Supervisor
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.launch.output.summary import (
    LogTail,
    RunRecorder,
    finish_run,
    log_of,
    report_crash,
    resuming_command,
)
from axonlaunch.launch.run_folder.open_folder import check_run_dir, open_run_dir
from axonlaunch.planning.background_estimate import BackgroundEstimate
from axonlaunch.system.authentication import Credentials
from axonlaunch.system.node.cores import cores_of_ranks
from axonlaunch.system.processes import forked_call, forkserver

LOOPBACK = "127.0.0.1"
RANK = "axonlaunch.launch.local.rank_process:main"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The rendezvous of the ranks for one attempt at a run.

    Attributes:
        address: Address of the rank or process that listens.
        port: Port of the rank or process that listens.
        credentials: Credentials with which the launcher and all its ranks sign messages.
        listener: Bound socket for rank 0; None if another process listens.
        node_rank: Number of this node.
        others: The other nodes; None if the run has one node.
    """

    address: str
    port: int
    credentials: Credentials
    listener: socket.socket | None = None
    node_rank: int = 0
    others: RemoteNodes | None = None


def check(config: RunConfig, options: LaunchOptions) -> RunConfig:
    """Check a run against this node and resolve the values that depend on it.

    Raises:
        ConfigError: This node can't run the configuration.
    """
    issues: list[ConfigIssue] = []
    with gathering(issues):
        config = _resolve(config, options)
    with gathering(issues):
        check_run_dir(config)
    with gathering(issues), _rendezvous(config):
        pass
    if issues:
        raise ConfigError(issues)
    return config


def _resolve(config: RunConfig, options: LaunchOptions) -> RunConfig:
    checking = forked_call.stream(
        options.fork_server,
        "axonlaunch.preflight.checks:resolving",
        config,
        task="checking the configuration",
    )
    while True:
        try:
            options.show(str(next(checking)))
        except StopIteration as done:
            checked: RunConfig = done.value
            return checked


def launch(config: RunConfig, options: LaunchOptions) -> tuple[int, dict[str, Any]]:
    """Run all ranks of a configuration on this node and report the result.

    Args:
        config: Configuration returned by ``check``.
        options: Options of the launch.

    Returns:
        The exit status and the content of ``summary.json``.

    Raises:
        ConfigError: The port is in use or the folder can't be created; nothing was started.
    """
    context = options.fork_server
    console = RunConsole(stream=sys.stderr if options.as_json else sys.stdout)
    with ExitStack() as stack:
        rendezvous = stack.enter_context(_rendezvous(config))
        opened = open_run_dir(
            config,
            announce=console.line,
            composed=options.composed,
            launched_by=options.identity.name,
        )
        config = stack.enter_context(opened)
        record = RunRecorder(options.started, console, proof=options.proof)
        record.prediction = stack.enter_context(closing(BackgroundEstimate(context, config)))
        restarts = 0
        try:
            outcome = run_ranks(config, context, rendezvous, record, console)
            limit = config.launch.max_restarts
            while outcome.crash is not None and not outcome.was_stopped and restarts < limit:
                restarts += 1
                console.stop()
                report_crash(config, outcome.crash, context)
                console.line(f"restart {restarts} of {limit}")
                with _rendezvous(config) as new_rendezvous:
                    outcome = run_ranks(
                        config, context, new_rendezvous, record, console, restarted=True
                    )
        finally:
            console.stop()
        again = resuming_command(
            config, options.command, composed=options.composed, name=options.resumed_name
        )
        return finish_run(config, outcome, record, console, context=context, again=again)


def run_ranks(
    config: RunConfig,
    context: ForkServerContext,
    rendezvous: Rendezvous,
    record: RunRecorder,
    console: RunConsole,
    *,
    restarted: bool = False,
) -> Outcome:
    """Start this node's ranks for one attempt at a run and supervise them until they end."""
    count = num_ranks(config)
    console.wait("starting 1 rank" if count == 1 else f"starting {count} ranks")
    heartbeats = HeartbeatTable.of(_processes(config), context)
    first = rendezvous.node_rank * _processes(config)
    supervisor = Supervisor(
        ranks=[],
        heartbeats=heartbeats,
        timeout_s=config.launch.timeout_s,
        report=record,
        tick=LogTail(log_of(config, first), console) if first == 0 else lambda: None,
        announce=console.line,
        others=rendezvous.others,
    )
    pickled = pickle.dumps(config)
    try:
        for spec in _rank_specs(config, rendezvous, heartbeats, restarted):
            receiver, sender = context.Pipe(duplex=False)
            process = forkserver.fork(context, RANK, pickled, spec, sender)
            sender.close()
            supervisor.ranks.append(Rank(spec.rank, spec.local_rank, process, receiver, spec.log))
    except (forkserver.ForkServerError, OSError) as error:
        return supervisor.fail_start(report_of_system(error, rank=first + len(supervisor.ranks)))
    except BaseException:
        supervisor.kill()
        raise
    return supervisor.run()


def _processes(config: RunConfig) -> int:
    assert config.launch.nproc != "auto"
    return 1 if config.launch.backend == "mock" else config.launch.nproc


def _rank_specs(
    config: RunConfig, rendezvous: Rendezvous, heartbeats: HeartbeatTable, restarted: bool
) -> list[RankSpec]:
    """Return the specification of each process of this node."""
    processes = _processes(config)
    first = rendezvous.node_rank * processes
    cores = None
    if config.launch.pin_cores:
        cores = cores_of_ranks(
            processes,
            allowed=os.sched_getaffinity(0),
            on_devices=config.launch.backend == "nccl",
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )
    return [
        RankSpec(
            rank=rank,
            world_size=num_ranks(config),
            local_rank=index,
            local_world_size=processes,
            master_addr=rendezvous.address,
            port=rendezvous.port,
            credentials=rendezvous.credentials.with_sender(f"rank {rank}"),
            listener=rendezvous.listener if rank == 0 else None,
            log=log_of(config, rank),
            heartbeats=heartbeats,
            threads=frozen_threads(config),
            cores=None if cores is None else cores[index],
            restarted=restarted,
        )
        for index, rank in enumerate(range(first, first + processes))
    ]


@contextmanager
def _rendezvous(config: RunConfig) -> Iterator[Rendezvous]:
    """Bind the port of the rendezvous on the loopback address until rank 0 has taken it over.

    Raises:
        ConfigError: The port is in use, or this node can't reach its loopback address.
    """
    credentials = Credentials.random(sender="launcher")
    if config.launch.backend == "mock":
        yield Rendezvous(address=LOOPBACK, port=0, credentials=credentials)
        return
    port = config.launch.master_port
    with socket.socket() as bound:
        # Lets a restart bind the port while closed connections of the last attempt linger.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((LOOPBACK, 0 if port == "auto" else port))
        except OSError as error:
            message = f"can't listen on it ({error.strerror}); use another, or auto"
            raise ConfigError([ConfigIssue("launch.master_port", message, port)]) from None
        bound.listen(1024)
        number = bound.getsockname()[1]
        _refuse_unreachable(LOOPBACK, number)
        yield Rendezvous(address=LOOPBACK, port=number, credentials=credentials, listener=bound)


def _refuse_unreachable(address: str, port: int) -> None:
    """Refuse an address without a route, to which ranks would try to connect until a timeout.

    Raises:
        ConfigError: There is no route to the address.
    """
    with socket.socket(type=socket.SOCK_DGRAM) as probe:  # its connect looks up the route only
        try:
            probe.connect((address, port))
        except OSError as error:
            message = (
                f"ranks meet at {address}, which this node can't reach ({error.strerror}); turn "
                "its loopback interface on: ip link set lo up"
            )
            raise ConfigError([ConfigIssue("", message)]) from None
