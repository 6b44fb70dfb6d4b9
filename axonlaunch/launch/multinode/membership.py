"""The nodes of a run: how one meets the others, and agrees with them on what is to be run.

They meet at node 0. Torch's store carries their messages; every node composes and
checks the same overrides itself, and a difference is reported before a rank starts.
"""

from __future__ import annotations

import dataclasses
import socket
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from axonlaunch import config as configuration
from axonlaunch.comm.authenticated_store import Channel
from axonlaunch.comm.rendezvous import meet_at
from axonlaunch.config import Composed, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.errors import plain
from axonlaunch.config.layout import nodes, num_ranks
from axonlaunch.launch import run_dir
from axonlaunch.launch.failures.outcome import Outcome
from axonlaunch.launch.local.launcher import Rendezvous
from axonlaunch.launch.multinode import run_end, run_identity, token
from axonlaunch.launch.multinode.coordination import Coordinator
from axonlaunch.launch.multinode.handshake import handshake, member_name
from axonlaunch.launch.multinode.node_settings import (
    is_elastic,
    is_first,
    meeting_port,
    node_order,
    ranks_of_node,
)
from axonlaunch.launch.multinode.rendezvous import Attempt, ElasticRendezvous, RunEndedError
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.launch.output.summary import log_event
from axonlaunch.system.authentication import Credentials, ForgedMessageError, derive_key

NODE_LOST_S = 5.0
"""Seconds of silence after which a node is lost: its processes have to be gone in ten."""
_OWN = ("launch.node_rank", "launch.token_file", "name", "run_dir")
"""What may differ between nodes: each says the first two itself, node 0 decides the others.
"""
_FORGED = (
    "what is in the store there was not written by a node of this run: give every node the "
    "same launch.token_file, and let no one else reach the port"
)


class NodeMembership:
    """This node, over all attempts at a run.

    Attributes:
        attempts: How many there were before this one.
        restarts: Those of them that failed; the others made room for a node.
        summary: Of a run that was finished before, on node 0.
        status: The exit status where this node takes part in no attempt.
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
        """Listen on node 0, or reach it.

        Args:
            config: As given to this node.
            problems: What it can't run it for.
            console: Takes lines for the user.
            composed: What the run's files, overrides and environment say on this node.
            launched_by: What is the same in all starts of the run by its scheduler.

        Raises:
            ConfigError: The address is not node 0's, its port is taken, nobody answers, or the
                token can't be read.
        """
        self._given = config
        self._problems = problems
        self._console = console
        self._composed, self._launched_by = composed, launched_by
        self._hosts = is_first(config)
        secret = token.read_token(config.launch)
        if secret is None:
            where = f"{config.launch.master_addr}:{meeting_port(config)}"
            warning = token.missing_token(config.launch, address=where)
            if self._hosts:
                console.line(warning)
        # It listens for as long as this is held.
        if not self._hosts:
            which = "" if config.launch.node_rank == "auto" else f" {config.launch.node_rank}"
            where = f"{config.launch.master_addr}:{meeting_port(config)}"
            console.line(f"node{which}: joining {where}")
        self._held = self._open(listens=self._hosts)
        self._credentials = self._name_run(derive_key(secret or b""))
        self._rounds: ElasticRendezvous | None = None
        self._frozen: RunConfig | None = None
        self._peers: Coordinator | None = None
        self.attempts = self.restarts = 0
        self.summary: dict[str, Any] | None = None
        self.status = 0

    def _open(self, *, listens: bool) -> dist.Store:
        """Connect to where the nodes meet."""
        launch, port = self._given.launch, meeting_port(self._given)
        timeout = timedelta(seconds=launch.timeout_s)
        try:
            return meet_at(launch.master_addr, port, listens=listens, timeout=timeout)
        except ValueError as error:
            problem = ConfigIssue("launch.master_addr", str(error), launch.master_addr)
            raise ConfigError([problem]) from None
        except (dist.DistNetworkError, dist.DistStoreError):
            message = (
                f"nothing listened at port {port} there for {launch.timeout_s:g} s; start node 0, "
                "and check that no firewall blocks the port"
            )
            raise ConfigError(
                [ConfigIssue("launch.master_addr", message, launch.master_addr)]
            ) from None

    def _name_run(self, key: bytes) -> Credentials:
        """Name the run on node 0, learn its name elsewhere.

        Raises:
            ConfigError: Who answers there is not of this run.
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
        """Meet the others for an attempt; return what all run, and where the ranks meet.

        None where the run was finished before, or ended before this node could take part; that is
        said.

        Raises:
            ConfigError: The nodes can't meet, or differ.
        """
        launch = self._given.launch
        if self._hosts and self._ends_at_once():
            return None
        try:
            now, store = self._round(), self._open(listens=False)
        except RunEndedError as ended:
            where = f"{launch.master_addr}:{meeting_port(self._given)}"
            self.status, said = run_end.exit_status_and_line(ended.status, where=where)
            self._console.log(said)
            return None
        credentials = dataclasses.replace(
            self._credentials, round=now.number, sender=member_name(now.member)
        )
        own = Channel(run_identity.keys_of(store, credentials, now.name), credentials)
        try:
            met, nonces = handshake(
                own,
                member=now.member,
                members=now.members,
                about=self._about(),
                timeout_s=launch.timeout_s,
                announce=lambda text: self._console.line(f"node {now.member}: {text}"),
                confirm=partial(run_identity.keep_identity, store, self._credentials),
            )
        except TimeoutError as missing:
            message = f"nodes {missing} did not join within launch.timeout_s={launch.timeout_s:g}"
            raise ConfigError([ConfigIssue("launch.nnodes", message, launch.nnodes)]) from None
        except ForgedMessageError:
            problem = ConfigIssue("launch.master_addr", _FORGED, launch.master_addr)
            raise ConfigError([problem]) from None
        self._peers = peers = Coordinator(
            own,
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
            self._take(peers)
        if self._frozen is None:
            return None
        config = configuration.with_values(self._frozen, {"launch.nnodes": now.members})
        peers.watch()
        self._say(config, now.member)
        rendezvous = Rendezvous(
            address=launch.master_addr,
            port=meeting_port(config),
            credentials=credentials,
            node_rank=now.member,
            others=peers,
        )
        return config, rendezvous

    def should_restart(self, outcome: Outcome) -> bool:
        """Whether an attempt that ended so is followed by another, which then counts."""
        assert self._peers is not None
        if outcome.crash is None:
            again = self._peers.will_restart and not outcome.killed
        elif outcome.was_stopped or self._peers.is_headless:
            again = False
        elif again := self.restarts < self._given.launch.max_restarts:
            self.restarts += 1
        self.attempts += again
        return again

    def leave(self, outcome: Outcome | None = None) -> None:
        """Take part no longer; nodes that wait or come later learn how the run ended.

        Args:
            outcome: Of the last attempt; None: the run was finished before.
        """
        if self._rounds is not None:
            self._rounds.leave("done" if outcome is None else run_end.status_of(outcome))

    def _ends_at_once(self) -> bool:
        """Whether an elastic run was finished before; tell nodes that come just now, on node 0.

        Those that were there before node 0, and found the run finished in the folder that they
        share with it, are gone: node 0 would wait in vain for the fewest nodes.
        """
        if self._frozen is not None or not is_elastic(self._given):
            return False
        with suppress(ConfigError):  # which is reported to all nodes that come
            if (summary := run_dir.finished_summary(self._given)) is not None:
                self.summary = summary
                self._console.log(run_dir.finished_text(self._given, summary))
                self._rendezvous_of_rounds().leave(stay_s=NODE_LOST_S)
                self._rounds = None
                return True
        return False

    def _round(self) -> Attempt:
        """Return the nodes of the next attempt.

        Raises:
            ConfigError: Too few came.
            RunEndedError: The run ended before this node could take part.
        """
        launch = self._given.launch
        least, most = nodes(self._given)
        if least == most and self.restarts == 0:
            return Attempt(-1, node_order(self._given), most)
        try:
            return self._rendezvous_of_rounds().next()
        except TimeoutError:
            message = f"fewer than {least} nodes joined within launch.timeout_s="
            problem = ConfigIssue("launch.nnodes", f"{message}{launch.timeout_s:g}", launch.nnodes)
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

    def _newcomers(self, now: Attempt) -> bool:
        """Whether a node waits that could take part, and nothing is lost by a new start."""
        if self._rounds is None or now.members == nodes(self._given)[1]:
            return False
        return self._given.checkpoint.every > 0 and self._rounds.newcomers() > 0

    def _about(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "config": configuration.flatten(
                configuration.to_interpolations(configuration.to_tree(self._given))
            ),
            "problems": [str(problem) for problem in self._problems],
        }

    def _freeze(self, peers: Coordinator, met: list[dict[str, Any]], folder: ExitStack) -> None:
        """Fix the configuration for all nodes, unless the run is finished; this one leads."""
        asked = configuration.with_values(self._given, {"launch.node_rank": "auto"})
        try:
            _check_agreement(met)
            if self._frozen is None and (summary := run_dir.finished_summary(asked)) is not None:
                self.summary = summary
                _launch_nothing(peers, finished=run_dir.finished_text(asked, summary))
                self._console.log(run_dir.finished_text(asked, summary))
                return
            if self._frozen is None:
                self._frozen = folder.enter_context(
                    run_dir.open_run_dir(
                        asked,
                        announce=self._console.line,
                        composed=self._composed,
                        launched_by=self._launched_by,
                    )
                )
        except ConfigError as error:
            _launch_nothing(peers, problems=[str(problem) for problem in error.problems])
            raise
        log_event(self._frozen, "nodes", {"hosts": [about["host"] for about in met]})
        frozen = {
            "config": configuration.to_yaml(self._frozen),
            "attempts": self.attempts,
            "restarts": self.restarts,
        }
        peers.publish("frozen", frozen)

    def _take(self, peers: Coordinator) -> None:
        """Take the configuration that node 0 froze, and keep it here too.

        Of a run that was finished before there is none.

        Raises:
            ConfigError: There is none, for the reasons that node 0 reports.
        """
        launch = self._given.launch
        try:
            frozen = peers.wait_for("frozen", timeout_s=launch.timeout_s)
        except TimeoutError:
            message = "node 0 is reachable but not in this run"
            raise ConfigError(
                [ConfigIssue("launch.master_addr", message, launch.master_addr)]
            ) from None
        except ForgedMessageError:
            problem = ConfigIssue("launch.master_addr", _FORGED, launch.master_addr)
            raise ConfigError([problem]) from None
        if "problems" in frozen:
            peers.watch()
            peers.leave()
            raise ConfigError([ConfigIssue("", problem) for problem in frozen["problems"]])
        if "finished" in frozen:
            peers.watch()
            peers.leave()
            self._console.log(frozen["finished"])
            return
        self.attempts, self.restarts = frozen["attempts"], frozen["restarts"]
        self._frozen = configuration.parse_frozen(frozen["config"])
        run_dir.adopt(self._frozen)

    def _say(self, config: RunConfig, member: int) -> None:
        if member == 0:
            return
        count, first = ranks_of_node(config), member * ranks_of_node(config)
        which = f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
        self._console.line(
            f"node {member} of {nodes(config)[1]}: {which} of {num_ranks(config)}; "
            f"node 0 at {config.launch.master_addr} reports progress"
        )


def _launch_nothing(peers: Coordinator, **why: Any) -> None:
    """Publish to the other nodes why no rank is started."""
    peers.publish("frozen", why)
    peers.watch()
    peers.leave()


def _check_agreement(met: list[dict[str, Any]]) -> None:
    """Check that every node can run, and that all run the same configuration.

    Raises:
        ConfigError: Every problem of every node.
    """
    first, problems = met[0]["config"], []
    for node, about in enumerate(met):
        where = f"node {node} ({about['host']})"
        problems += [ConfigIssue("", f"{where}: {problem}") for problem in about["problems"]]
        if about["problems"] or met[0]["problems"]:
            continue
        for key in sorted({*first, *about["config"]} - {*_OWN}):
            here, there = first.get(key), about["config"].get(key)
            if here != there:
                message = f"{where} has {plain(there)}; start every node with the same overrides"
                problems.append(ConfigIssue(key, message, here))
    if problems:
        raise ConfigError(problems)
