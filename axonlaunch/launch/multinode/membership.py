"""Connects a node with the other nodes of a run and agrees with them on the configuration.

Nodes exchange messages over torch's store on node 0. Every node composes and checks the same
overrides. Differences are reported before a rank starts.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from axonlaunch import config as configuration
from axonlaunch.comm.connection.authenticated_store import Channel
from axonlaunch.comm.connection.rendezvous import meet_at
from axonlaunch.config import Composed, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.consistency.layout import nodes, num_ranks
from axonlaunch.config.problems.errors import TRANSIENT
from axonlaunch.launch.failures.outcome import Outcome
from axonlaunch.launch.local.launcher import Rendezvous
from axonlaunch.launch.multinode import run_end, run_identity, token
from axonlaunch.launch.multinode.coordination import Coordinator
from axonlaunch.launch.multinode.handshake import EarlierStartError, handshake, member_name
from axonlaunch.launch.multinode.node_settings import (
    check_agreement,
    is_elastic,
    is_first,
    meeting_port,
    node_order,
    ranks_of_node,
)
from axonlaunch.launch.multinode.rendezvous import (
    Attempt,
    ElasticRendezvous,
    NodeLostError,
    RunEndedError,
)
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.launch.output.summary import log_event
from axonlaunch.launch.run_folder import finished_runs
from axonlaunch.launch.run_folder.open_folder import create_joined, open_run_dir
from axonlaunch.system.authentication import Credentials, ForgedMessageError, derive_key

NODE_LOST_S = 5.0
"""Seconds of silence after which a node is lost. Its processes must have ended after ten."""
_CONNECT_S = 5.0
"""Seconds in which a node 0 that is there takes a connection."""
_AGAIN_S = 0.5
"""Seconds between two looks for node 0."""
_FIRST = -1
"""Number of the first attempt of a fixed number of nodes, which begins without a rendezvous."""
_INTERRUPTED = 130
_FORGED = (
    "what is in the store there was not written by a node of this run: give every node the "
    "same launch.token_file, and let no one else reach the port"
)


class NodeMembership:
    """Membership of this node in a run, over all attempts.

    Attributes:
        attempts: Number of earlier attempts.
        restarts: Number of earlier attempts that failed; the others ended to admit a new node.
        summary: Summary of a run that was already finished, on node 0; otherwise None.
        status: Exit status of a node that takes part in no attempt.
        lacks_nodes: Whether too few nodes came for another attempt.
    """

    def __init__(
        self,
        config: RunConfig,
        problems: list[ConfigIssue],
        console: RunConsole,
        *,
        composed: Composed | None = None,
        launched_by: str = "",
    ) -> None:
        """Listen as node 0, or connect to it.

        Args:
            config: Configuration of this node.
            problems: Reasons why this node can't run the configuration.
            console: Console that shows lines to the user.
            composed: Composed files, overrides and environment of the run on this node.
            launched_by: Name that is the same in all starts of the run by its scheduler.

        Raises:
            ConfigError: The address is not that of node 0, its port is in use, no process answers,
                or the token can't be read.
        """
        self._given = config
        self._problems = problems
        self._console = console
        self._composed, self._launched_by = composed, launched_by
        self._hosts = is_first(config)
        secret = token.read_token(config.launch)
        if secret is None:
            warning = token.missing_token(config.launch, address=self._address)
            if self._hosts:
                console.line(warning)
        self._key = derive_key(secret or b"")
        self._frozen: RunConfig | None = None
        self._peers: Coordinator | None = None
        self.attempts = self.restarts = 0
        self.summary: dict[str, Any] | None = None
        self.status = 0
        self.lacks_nodes = False
        self._connect()

    @property
    def _name(self) -> str:
        """This node in a line for the user."""
        rank = self._given.launch.node_rank
        return "node" if rank == "auto" else f"node {rank}"

    @property
    def _address(self) -> str:
        return f"{self._given.launch.master_addr}:{meeting_port(self._given)}"

    def _connect(self) -> None:
        """Listen as node 0, or connect to the node 0 that listens now."""
        if not self._hosts:
            self._console.line(f"{self._name}: joining {self._address}")
        # Node 0 listens as long as this store object exists.
        self._held = self._open(listens=self._hosts)
        self._credentials = self._name_run(self._key)
        self._rounds: ElasticRendezvous | None = None
        self._is_late = False

    def _open(self, *, listens: bool) -> dist.Store:
        """Connect to the store of the run."""
        launch, port = self._given.launch, meeting_port(self._given)
        timeout = timedelta(seconds=launch.timeout_s)
        try:
            if not listens:
                self._await_listener(launch.master_addr, port)
            return meet_at(launch.master_addr, port, listens=listens, timeout=timeout)
        except ValueError as error:
            problem = ConfigIssue("launch.master_addr", str(error), launch.master_addr)
            raise ConfigError([problem]) from None
        except (OSError, dist.DistNetworkError, dist.DistStoreError):
            message = (
                f"nothing listened at port {port} there for {launch.timeout_s:g} s; start node 0, "
                "and check that no firewall blocks the port"
            )
            raise ConfigError(
                [ConfigIssue("launch.master_addr", message, launch.master_addr, is_transient=True)]
            ) from None

    def _await_listener(self, host: str, port: int) -> None:
        """Wait until node 0 listens. Unlike in torch's wait, a signal ends it.

        Raises:
            OSError: No process listens there in time.
        """
        deadline = time.monotonic() + self._given.launch.timeout_s
        while True:
            try:
                socket.create_connection((host, port), timeout=_CONNECT_S).close()
            except OSError:  # the host may have no address yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(_AGAIN_S)
            else:
                return

    def _name_run(self, key: bytes) -> Credentials:
        """Choose the name of the run on node 0; on other nodes read it.

        Raises:
            ConfigError: The process that listens does not belong to this run.
        """
        if self._hosts:
            return run_identity.publish_identity(self._held, key)
        launch = self._given.launch
        try:
            return run_identity.learn(self._held, key, timeout_s=launch.timeout_s)
        except TimeoutError:
            message = (
                f"what listens at port {meeting_port(self._given)} there is not an axonlaunch run"
            )
        except ForgedMessageError:
            message = _FORGED
        raise ConfigError([ConfigIssue("launch.master_addr", message, launch.master_addr)])

    def rendezvous(self, folder: ExitStack) -> tuple[RunConfig, Rendezvous] | None:
        """Meet the other nodes for an attempt.

        Args:
            folder: Keeps the run folder locked on node 0.

        Returns:
            The common configuration and the rendezvous of the ranks; None if the run has already
            ended, which is printed.

        Raises:
            ConfigError: The nodes can't meet or have different configurations.
        """
        if self._hosts and self._ends_at_once():
            return None
        while True:
            try:
                return self._join(folder)
            except NodeLostError:
                self._console.line("a node was lost before the attempt began: waiting for nodes")
            except EarlierStartError:
                self._is_late = True
                self._console.line(
                    f"{self._name}: the run goes on with an earlier start of this node; waiting "
                    "for its next attempt"
                )
            except (RunEndedError, dist.DistNetworkError, dist.DistStoreError) as error:
                if self._hosts and not isinstance(error, RunEndedError):
                    raise
                ended = error.status if isinstance(error, RunEndedError) else ""
                if self._waits_for_next_run(ended):
                    continue
                self.status, said = run_end.exit_status_and_line(ended, address=self._address)
                self._console.log(said)
                return None

    def _waits_for_next_run(self, status: str) -> bool:
        """Connect to the next node 0 if the one that was there has ended without this node.

        A scheduler that replaces nodes at different times starts a node 0 again. In an elastic run,
        node 0 must stay.

        Args:
            status: End of the run according to node 0; empty if it left no message.
        """
        if self.attempts or is_elastic(self._given) or status == "done":
            return False
        self._console.line(f"{self._name}: node 0 has ended ({status or 'lost'})")
        if self._rounds is not None:
            self._rounds.leave()
        time.sleep(_AGAIN_S)
        try:
            self._connect()
        except ConfigError as error:  # no scheduler has replaced it
            self._console.line(f"{self._name}: {error.problems[0]}")
            return False
        return True

    def _join(self, folder: ExitStack) -> tuple[RunConfig, Rendezvous] | None:
        """Meet the other nodes once.

        Raises:
            NodeLostError: A node was lost before the attempt began.
            EarlierStartError: An earlier start of this node takes part in the attempt.
            RunEndedError: The run ended before this node could take part.
            ConfigError: The nodes can't meet or have different configurations.
        """
        now, store = self._round(), self._open(listens=False)
        credentials = dataclasses.replace(
            self._credentials, round=now.number, sender=member_name(now.member)
        )
        channel = Channel(run_identity.keys_of(store, credentials, now.name), credentials)
        joined = self._meet(channel, now, store)
        if joined is None:
            return None
        met, nonces = joined
        self._peers = peers = Coordinator(
            channel,
            nonces=nonces,
            member=now.member,
            members=now.members,
            first_ranks=[node * ranks_of_node(self._given) for node in range(now.members)],
            lost_s=NODE_LOST_S,
            are_nodes=True,
            newcomers=partial(self._newcomers, now),
        )
        if met is not None:
            self._freeze(peers, met, folder)
        else:
            self._take(peers, now, store)
        if self._frozen is None:
            return None
        config = configuration.with_values(self._frozen, {"launch.nnodes": now.members})
        peers.watch()
        self._say(config, now.member)
        rendezvous = Rendezvous(
            address=self._given.launch.master_addr,
            port=meeting_port(config),
            credentials=credentials,
            node_rank=now.member,
            others=peers,
        )
        return config, rendezvous

    def _meet(
        self, channel: Channel, now: Attempt, store: dist.Store
    ) -> tuple[list[Any] | None, list[str]] | None:
        """Exchange signed messages with the other nodes of an attempt.

        Returns:
            The result of ``handshake``; None if the others know that the run is finished.

        Raises:
            NodeLostError: A node was lost before the attempt began.
            RunEndedError: The run ended before this node could take part.
            ConfigError: The nodes can't meet.
        """
        launch = self._given.launch
        try:
            return handshake(
                channel,
                member=now.member,
                members=now.members,
                unit="node",
                about=self._about(),
                timeout_s=launch.timeout_s,
                announce=lambda text: self._console.line(f"node {now.member}: {text}"),
                confirm=partial(self._confirm, now, store),
            )
        except TimeoutError as missing:
            if self._hosts and self._is_finished():
                return None  # the others share its folder, so they knew it and did not wait
            message = f"nodes {missing} did not join within launch.timeout_s={launch.timeout_s:g}"
            problem = ConfigIssue("launch.nnodes", message, launch.nnodes, is_transient=True)
            raise ConfigError([problem]) from None
        except ForgedMessageError:
            problem = ConfigIssue("launch.master_addr", _FORGED, launch.master_addr)
            raise ConfigError([problem]) from None

    def should_restart(self, outcome: Outcome) -> bool:
        """Return whether another attempt follows an outcome, and count it."""
        assert self._peers is not None
        if outcome.crash is None:
            again = self._peers.will_restart and not outcome.killed
        elif outcome.was_stopped or self._peers.is_headless:
            again = False
        elif again := self.restarts < self._given.launch.max_restarts:
            self.restarts += 1
        self.attempts += again
        return again

    @property
    def has_lost_node_0(self) -> bool:
        """Whether node 0 was lost before it determined how the run ended."""
        peers = self._peers
        return peers is not None and peers.is_headless and not peers.is_judged

    def exit_status(self, outcome: Outcome, status: int) -> int:
        """Return the exit status, by which a scheduler decides whether to start this node again.

        Args:
            outcome: Outcome of the last attempt.
            status: Exit status if no scheduler replaces nodes.
        """
        crash = outcome.crash
        if crash is not None and outcome.was_stopped:
            return _INTERRUPTED
        is_lost = crash is not None and (
            self.has_lost_node_0
            # With restarts, the other nodes have waited for the one that was lost.
            or (crash.first.kind == "lost" and self._given.launch.max_restarts == 0)
        )
        return TRANSIENT if is_lost or self.lacks_nodes else status

    def leave(self, outcome: Outcome | None = None) -> None:
        """Leave the run. Nodes that wait or come later learn how it ended.

        Args:
            outcome: Outcome of the last attempt; None if the run was finished before.
        """
        if self._hosts or self._rounds is not None:
            status = "done" if outcome is None else run_end.status_of(outcome)
            if self.lacks_nodes:
                status = run_end.TOO_FEW_NODES
            self._rendezvous_of_rounds().leave(status)

    def _ends_at_once(self) -> bool:
        """Return whether an elastic run was finished before.

        If so, node 0 tells nodes that arrive now. Nodes that arrived before node 0 have left: they
        found the run finished in the shared folder. Node 0 would wait for the minimum number of
        nodes in vain.
        """
        if not is_elastic(self._given) or not self._is_finished():
            return False
        self._rendezvous_of_rounds().leave(stay_s=NODE_LOST_S)
        self._rounds = None
        return True

    def _is_finished(self) -> bool:
        """Return whether the run was complete when this node joined; if so, print its summary."""
        if self._frozen is None:
            with suppress(ConfigError):  # which is reported to all nodes that come
                if (summary := finished_runs.finished_summary(self._given)) is not None:
                    self.summary = summary
                    self._console.log(finished_runs.finished_text(self._given, summary))
                    return True
        return False

    def _round(self) -> Attempt:
        """Wait for the next attempt and return it.

        Raises:
            ConfigError: Too few nodes joined in time for the first attempt.
            RunEndedError: The run ended before this node could take part, or too few nodes joined
                in time for another attempt.
        """
        launch = self._given.launch
        least, most = nodes(self._given)
        if least == most and self.restarts == 0 and not self._is_late:
            return Attempt(_FIRST, node_order(self._given), most)
        try:
            return self._rendezvous_of_rounds().next()
        except TimeoutError:
            message = (
                f"fewer than {least} nodes joined within launch.timeout_s={launch.timeout_s:g}"
            )
            if self.attempts:
                self._console.log(message)
                self.lacks_nodes = True
                raise RunEndedError(run_end.TOO_FEW_NODES) from None
            problem = ConfigIssue("launch.nnodes", message, launch.nnodes, is_transient=True)
            raise ConfigError([problem]) from None

    def _rendezvous_of_rounds(self) -> ElasticRendezvous:
        if self._rounds is None:
            least, most = nodes(self._given)
            store = self._open(listens=False)
            self._rounds = ElasticRendezvous(
                run_identity.keys_of(store, self._credentials, "rounds"),
                self._credentials,
                first=self._hosts,
                least=least,
                most=most,
                order=node_order(self._given),
                timeout_s=self._given.launch.timeout_s,
            )
        return self._rounds

    def _confirm(self, now: Attempt, store: dist.Store) -> None:
        """Check that an attempt can begin.

        Raises:
            NodeLostError: A node of it was lost.
            RunEndedError: Node 0 is gone.
            ForgedMessageError: Another process has overwritten the name of the run.
        """
        if self._hosts:
            run_identity.keep_identity(store, self._credentials)
        if now.number != _FIRST:
            self._rendezvous_of_rounds().confirm(now)

    def _newcomers(self, now: Attempt) -> bool:
        """Return whether a node waits that can join, and a restart loses no progress."""
        if self._rounds is None or now.members == nodes(self._given)[1]:
            return False
        return bool(self._given.checkpoint.every) and self._rounds.newcomers() > 0

    def _about(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "config": configuration.flatten(
                configuration.to_interpolations(configuration.to_tree(self._given))
            ),
            "problems": _to_message(self._problems),
        }

    def _freeze(self, peers: Coordinator, met: list[dict[str, Any]], folder: ExitStack) -> None:
        """Freeze the configuration for all nodes unless the run is finished. Node 0 calls this."""
        shared = configuration.with_values(self._given, {"launch.node_rank": "auto"})
        try:
            check_agreement(met)
            if (
                self._frozen is None
                and (summary := finished_runs.finished_summary(shared)) is not None
            ):
                self.summary = summary
                peers.call_off({"finished": finished_runs.finished_text(shared, summary)})
                self._console.log(finished_runs.finished_text(shared, summary))
                return
            if self._frozen is None:
                self._frozen = folder.enter_context(
                    open_run_dir(
                        shared,
                        announce=self._console.line,
                        composed=self._composed,
                        launched_by=self._launched_by,
                    )
                )
        except ConfigError as error:
            peers.call_off({"problems": _to_message(error.problems)})
            raise
        log_event(self._frozen, "nodes", {"hosts": [about["host"] for about in met]})
        frozen = {
            "config": configuration.to_yaml(self._frozen),
            "attempts": self.attempts,
            "restarts": self.restarts,
        }
        peers.publish("frozen", frozen)

    def _take(self, peers: Coordinator, now: Attempt, store: dist.Store) -> None:
        """Receive the frozen configuration from node 0 and write it here too.

        If the run is already finished, there is no configuration.

        Raises:
            NodeLostError: A node was lost before the attempt began.
            EarlierStartError: An earlier start of this node takes part in the attempt.
            RunEndedError: Node 0 is gone.
            ConfigError: Node 0 reports problems or does not answer.
        """
        launch, confirm = self._given.launch, partial(self._confirm, now, store)
        try:
            frozen = peers.wait_for("frozen", timeout_s=launch.timeout_s, confirm=confirm)
        except TimeoutError:
            message = "node 0 is reachable but not in this run"
            raise ConfigError(
                [ConfigIssue("launch.master_addr", message, launch.master_addr, is_transient=True)]
            ) from None
        except ForgedMessageError as error:
            if isinstance(error, EarlierStartError) and now.number == _FIRST:
                raise
            problem = ConfigIssue("launch.master_addr", _FORGED, launch.master_addr)
            raise ConfigError([problem]) from None
        if "problems" in frozen:
            peers.watch()
            peers.leave()
            raise ConfigError(
                [ConfigIssue("", text, is_transient=passes) for text, passes in frozen["problems"]]
            )
        if "finished" in frozen:
            peers.watch()
            peers.leave()
            self._console.log(frozen["finished"])
            return
        self.attempts, self.restarts = frozen["attempts"], frozen["restarts"]
        self._frozen = configuration.parse_frozen(frozen["config"])
        create_joined(self._frozen)

    def _say(self, config: RunConfig, member: int) -> None:
        if member == 0:
            return
        count, first = ranks_of_node(config), member * ranks_of_node(config)
        which = f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
        self._console.line(
            f"node {member} of {nodes(config)[1]}: {which} of {num_ranks(config)}; "
            f"node 0 at {config.launch.master_addr} reports progress"
        )


def _to_message(problems: list[ConfigIssue]) -> list[tuple[str, bool]]:
    """Return problems as text, with whether they are transient, for a message to other nodes."""
    return [(str(problem), problem.is_transient) for problem in problems]
