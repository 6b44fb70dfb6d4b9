"""This process as one rank of a world that others started: torchrun, mpirun, srun or a person.

It starts no rank. Rank 0 composes, checks and freezes the configuration; the others take it from
torch's store. A thread of each watches the others, and rank 0's tells how the run ends.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TextIO

import torch.distributed as dist

from axonlaunch import config as configuration
from axonlaunch.comm.authenticated_store import Channel
from axonlaunch.comm.authentication import ForgedMessageError, derive_key
from axonlaunch.comm.rendezvous import is_loopback, meet_at
from axonlaunch.config import ConfigError, Problem, RunConfig
from axonlaunch.config.errors import plain
from axonlaunch.config.layout import frozen_threads, nodes
from axonlaunch.config.schema import LaunchConfig
from axonlaunch.launch import run_dir
from axonlaunch.launch.cluster_environment import Surroundings
from axonlaunch.launch.external.launcher_process import LauncherProcess
from axonlaunch.launch.failures import hang
from axonlaunch.launch.failures.report import Crash, Kind, Report
from axonlaunch.launch.failures.root_cause import judge
from axonlaunch.launch.local import rank_process as ranks
from axonlaunch.launch.local.heartbeat import Pulse
from axonlaunch.launch.local.messages import Place
from axonlaunch.launch.local.supervisor import Outcome
from axonlaunch.launch.multinode import run_identity, token
from axonlaunch.launch.multinode.coordination import Peers, meet, member_name
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.launch.output.summary import Record, Tail, conclude, log_of, tell_crash
from axonlaunch.planning.background_estimate import Prediction
from axonlaunch.system.streams import tolerant

JOIN_S = 300.0
"""Seconds in which all ranks have to have been started."""
LOST_S = 20.0
"""Seconds of silence after which a rank is lost. Its watching thread shares the interpreter with
training, so a short silence says nothing; a launcher notices a process that ended at once."""
_TICK_S = 0.1
_FORGED = (
    "what stands in the store there was not written by a rank of this run: give every rank the "
    "same launch.token_file, and let nobody else reach the port"
)


def train(
    found: Surroundings,
    compose: Callable[[Surroundings], RunConfig],
    *,
    launch: LaunchConfig,
    launcher: LauncherProcess,
    started: float,
    as_json: bool = False,
) -> tuple[int, dict[str, Any] | None]:
    """Be a rank.

    Args:
        found: Which one.
        launch: What is said of the token.
        compose: Makes the resolved configuration, on rank 0.
        launcher: What started it, watched.
        started: ``time.time()`` when the command began.
        as_json: Keep standard output free.

    Returns:
        The exit status and, on rank 0, what was written to ``summary.json``. A run that fails ends
        the process instead.

    Raises:
        ConfigError: The ranks can't meet, or the configuration can't be run; rank 0 alone tells the
            latter.
    """
    assert found.local_rank is not None
    channel, machines, nonces = _join(found, _key(found, launch))
    peers = Peers(
        channel,
        nonces=nonces,
        member=found.rank,
        members=found.world_size,
        first_ranks=list(range(found.world_size)),
        lost_s=LOST_S,
        are_machines=False,
    )
    with ExitStack() as folder:
        if found.rank == 0:
            try:
                given = compose(_counted(found, machines))
                tell = partial(print, file=sys.stderr)
                config = folder.enter_context(
                    run_dir.create(given, tell=tell, sharing=_sharing(given))
                )
            except ConfigError:
                peers.tell("frozen", {"refused": True})
                peers.watch()
                peers.farewell()
                raise
            peers.tell("frozen", {"config": configuration.to_yaml(config)})
        else:
            told = _frozen(peers)
            if told is None:
                return 2, None
            config = told
        return _run(config, found, peers, launcher, started=started, as_json=as_json)


def _key(found: Surroundings, launch: LaunchConfig) -> bytes:
    """Return the key of the run's messages; rank 0 says where there is no secret.

    Ranks of one node find the same token in this user's own folder.

    Raises:
        ConfigError: There is a file that is no secret, or none where one is required.
    """
    secret = token.read(launch)
    assert found.master_addr is not None
    if secret is None and (
        found.local_world_size == found.world_size or is_loopback(found.master_addr)
    ):
        secret = token.of_this_user()
    if secret is None:
        warning = token.without(launch, address=f"{found.master_addr}:{found.master_port}")
        if found.rank == 0:
            print(warning, file=sys.stderr)
    return derive_key(secret or b"")


def _join(
    found: Surroundings, key: bytes
) -> tuple[Channel, list[dict[str, Any]] | None, list[str]]:
    """Meet the other ranks; rank 0 learns what each said of itself.

    Returns:
        Where they meet, what each said, and the nonces for ``Peers``.

    Raises:
        ConfigError: They can't meet.
    """
    assert found.master_addr is not None
    assert found.master_port is not None
    where = f"{found.master_addr}:{found.master_port}"
    try:
        store = meet_at(
            found.master_addr,
            found.master_port,
            listens=found.rank == 0 and not found.agent_hosts_store,
            timeout=timedelta(seconds=JOIN_S),
        )
    except ValueError as error:
        raise ConfigError([Problem("", str(error))]) from None
    except (dist.DistNetworkError, dist.DistStoreError):
        message = f"rank {found.rank} waited {JOIN_S:g} s, and rank 0 does not listen there"
        raise ConfigError([Problem("MASTER_ADDR", message, where)]) from None
    job = dist.PrefixStore(f"axonlaunch/{found.run_id}", store)
    try:
        if found.rank == 0:
            named = run_identity.announce(job, key)
        else:
            named = run_identity.learn(job, key, timeout_s=JOIN_S)
    except TimeoutError:
        message = f"rank {found.rank} waited {JOIN_S:g} s, and rank 0 began no run there"
        raise ConfigError([Problem("MASTER_ADDR", message, where)]) from None
    except ForgedMessageError:
        raise ConfigError([Problem("MASTER_ADDR", _FORGED, where)]) from None
    credentials = named.of(member_name(found.rank))
    channel = Channel(run_identity.keys_of(job, credentials, "members"), credentials)
    try:
        about = {"machine": socket.gethostname(), "local_rank": found.local_rank}
        machines, nonces = meet(
            channel,
            member=found.rank,
            members=found.world_size,
            about=about,
            timeout_s=JOIN_S,
            announce=lambda text: print(f"rank {text}", file=sys.stderr),
        )
    except TimeoutError as missing:
        message = f"ranks {missing} did not come within {JOIN_S:g} s"
        raise ConfigError([Problem("WORLD_SIZE", message, found.world_size)]) from None
    except ForgedMessageError:
        raise ConfigError([Problem("MASTER_ADDR", _FORGED, where)]) from None
    return channel, machines, nonces


def _counted(found: Surroundings, members: list[dict[str, Any]] | None) -> Surroundings:
    """Complete the surroundings by how many ranks each machine has.

    Raises:
        ConfigError: Not all have as many.
    """
    assert members is not None
    given = [member["local_rank"] for member in members]
    nproc = max(given) + 1
    if given != list(range(nproc)) * (found.world_size // nproc):
        message = (
            f"ranks 0 to {found.world_size - 1} have the local ranks {plain(given)}; start as many "
            "on each machine, those of one machine in a row (srun --distribution=block)"
        )
        raise ConfigError([Problem("WORLD_SIZE", message, found.world_size)])
    return dataclasses.replace(found, local_world_size=nproc)


def _frozen(peers: Peers) -> RunConfig | None:
    """Take the configuration that rank 0 froze; None where it refused."""
    try:
        told = peers.ask("frozen", timeout_s=JOIN_S)
    except TimeoutError:
        message = f"rank 0 told no configuration within {JOIN_S:g} s"
        raise ConfigError([Problem("", message)]) from None
    except ForgedMessageError:
        raise ConfigError([Problem("MASTER_ADDR", _FORGED)]) from None
    if "refused" in told:
        peers.watch()
        peers.farewell()
        return None
    config = configuration.parsed(told["config"])
    run_dir.keep(config)
    return config


def _run(
    config: RunConfig,
    found: Surroundings,
    peers: Peers,
    launcher: LauncherProcess,
    *,
    started: float,
    as_json: bool,
) -> tuple[int, dict[str, Any] | None]:
    assert found.local_rank is not None
    assert config.launch.nproc != "auto"
    assert found.master_addr is not None
    assert found.master_port is not None
    output, errors = os.dup(1), os.dup(2)
    log = log_of(config, found.rank)
    ranks.redirect(log)
    stream = tolerant(os.fdopen(errors if as_json else output, "w", buffering=1))
    console = RunConsole(stream=stream, is_plain=True)
    record = Record(started, console)
    # Not forked from this process, which has threads and a device.
    record.prediction = Prediction(multiprocessing.get_context("spawn"), config)
    place = Place(
        rank=found.rank,
        world_size=found.world_size,
        local_rank=found.local_rank,
        local_world_size=config.launch.nproc,
        nnodes=nodes(config)[1],
        master_addr=found.master_addr,
        port=found.master_port,
        credentials=peers.channel.credentials.of(f"rank {found.rank}"),
        listener=None,
        log=log,
        pulse=Pulse.of(config.launch.nproc),
        threads=frozen_threads(config),
        cores=None,  # who started this process placed it
    )
    asked = _Asked()
    peers.watch()
    told_errors = tolerant(os.fdopen(errors, "w", buffering=1)) if not as_json else stream
    watch = _Watch(config, place, peers, launcher, record, console, told_errors)
    watch.start()
    try:
        ranks.claim_cores(place)
        finished = ranks.work(
            config, place, report=record if found.rank == 0 else _unshown, stop=asked.is_set
        )
    except BaseException as error:
        peers.post(ranks.report_of(error, place))
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
    if found.rank:
        return status, None
    assert not isinstance(everyone, Crash)
    from axonlaunch.events import of_all_ranks

    with closing(record.prediction):
        return conclude(config, Outcome(finished=of_all_ranks(everyone)), record, console)


def _sharing(config: RunConfig) -> int:
    """Return how many ranks share the cores that this process may use."""
    assert config.launch.nproc != "auto"
    allowed, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return config.launch.nproc if allowed == all_cores else 1


def _unshown(event: object) -> None:
    del event


class _Asked:
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


class _Watch(threading.Thread):
    """Follows this rank and the others beside training, and ends the process when one fails."""

    def __init__(
        self,
        config: RunConfig,
        place: Place,
        peers: Peers,
        launcher: LauncherProcess,
        record: Record,
        console: RunConsole,
        errors: TextIO,
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self._config = config
        self._place = place
        self._peers = peers
        self._launcher = launcher
        self._record = record
        self._console = console
        self._errors = errors
        self._over = threading.Event()
        self._tail = Tail(place.log, console) if place.rank == 0 else None

    def end(self) -> None:
        """Watch no more: every rank has ended well."""
        self._over.set()
        self.join()
        if self._tail:
            self._tail()

    def run(self) -> None:
        try:
            self._follow()
        except BaseException as error:
            # Without it the training thread would wait for ever for an end that nobody decides.
            traceback.print_exception(error, file=self._errors)
            os._exit(1)

    def _follow(self) -> None:
        while not self._over.wait(_TICK_S):
            if self._tail:
                self._tail()
            if self._launcher.is_gone.is_set():
                self._fail_without_launcher()
            elif self._peers.failure():
                self._fail([])
            elif (report := self._hang()) is not None:
                self._fail([report])

    def _hang(self) -> Report | None:
        place, beat = self._place, self._place.pulse.read(self._place.local_rank)
        waited = self._config.launch.timeout_s
        if beat.phase == "done" or time.monotonic() - beat.at < waited:
            return None
        me = {place.local_rank: os.getpid()}
        where = hang.ask(me, {place.local_rank: place.log})[place.local_rank]
        return where.told(self._report("hang"), timeout_s=waited)

    def _report(self, kind: Kind, reason: str = "") -> Report:
        place, beat = self._place, self._place.pulse.read(self._place.local_rank)
        return Report(
            rank=place.rank,
            kind=kind,
            reason=reason,
            machine=socket.gethostname(),
            log=str(place.log),
            step=beat.step,
            doing=beat.phase,
        )

    def _fail_without_launcher(self) -> NoReturn:
        """End with the launcher; the store may have been its own, so nothing is agreed on."""
        name, pid = self._launcher.name, self._launcher.pid
        reason = (
            f"its launcher {name} (process {pid}) is gone: it was killed, or had no memory left"
        )
        report = self._report("lost", reason)
        self._peers.post(report)  # the ranks of other nodes may learn of it
        time.sleep(_TICK_S)
        self._end(judge([report]), tells=self._place.rank == 0)

    def _fail(self, reports: list[Report]) -> NoReturn:
        """Agree on who was first, tell it on rank 0, and end this process."""
        crash = self._peers.verdict(reports)
        self._end(crash, tells=self._place.rank == 0 or not self._peers.is_judged)

    def _end(self, crash: Crash, *, tells: bool) -> NoReturn:
        """End this process; rank 0 writes the run's summary too."""
        if self._place.rank == 0:
            self._console.stop()
            sys.stderr = self._errors
            conclude(self._config, Outcome(crash=crash), self._record, self._console)
        elif tells:
            sys.stderr = self._errors  # rank 0 is gone and tells nothing
            tell_crash(self._config, crash)
        sys.stderr.flush()
        self._record.prediction.close()
        os._exit(1)
