"""What the processes of a run on several nodes exchange, over torch's store.

Each sends heartbeats, so that silence is noticed; failures are gathered by member 0, which alone
judges who was first. All of it is signed JSON; what another than the named member wrote is ignored.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from axonlaunch.comm.authenticated_store import Channel
from axonlaunch.events import Finished
from axonlaunch.launch.failures.report import Crash, Report
from axonlaunch.launch.failures.root_cause import find_root_cause, is_conclusive
from axonlaunch.launch.multinode.handshake import heartbeat_message, member_name, read_message
from axonlaunch.system.authentication import ForgedMessageError

_BEAT_S = 0.3
_LEAVE_S = 2.0
_AGAIN = "again"
_SETTLE_S = 1.5
"""How long member 0 waits for other nodes' reports after the first failure."""


class Coordinator:
    """This process among the members of a run.

    One class for member 0, which leads, and the others: most of what they do is the same. A run of
    two nodes, in which a rank of node 1 crashes; each line is a key of the store and who writes it:

        heartbeat/0, /1   both, every 0.3 s: a count, this member's failures, and whether it was
                          asked to stop
        heartbeat/1       member 1: with the report of its rank, as soon as it is known
        root_cause        member 0, as soon as that explains it: which rank failed first, and why
        left/1, left/0    both: read, and gone; member 0 waits for the others, for it has the store

    In a run that succeeds ``done/0`` and ``done/1`` come instead, with what ranks reported, then
    ``over`` of member 0, then ``left``. Member 0 is in ``_judge``, ``_poll_members`` and
    ``_all_of``; the others are in ``_await_root_cause``, ``_poll_leader`` and ``_said``.

    Attributes:
        channel: Where they meet, under what is the run's alone.
        member: Which one this is; 0 leads.
        members: How many there are.
        will_restart: Once all have ended: whether they meet again, with newcomers.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        nonces: list[str],
        member: int,
        members: int,
        first_ranks: list[int],
        lost_s: float,
        are_nodes: bool,
        newcomers: Callable[[], bool] = lambda: False,
    ) -> None:
        """Join; nothing is watched before ``watch``.

        Args:
            channel: Where the members meet; used by nobody else while this lives.
            nonces: Those of all members on member 0, elsewhere this one's, of ``handshake``.
            member: Which one this is.
            members: How many there are.
            first_ranks: The first rank of each.
            lost_s: Seconds of silence after which a member is lost.
            are_nodes: Whether each supervises a node's ranks and does nothing else, so that
                its silence fails the run. One that is a rank may be silent while it works; its
                silence only explains another's failure, until all have nothing left to do.
            newcomers: Whether somebody waits to join who could; member 0 alone asks, in the
                thread that listens.
        """
        self.channel = channel
        self._nonces = nonces
        self.member = member
        self.members = members
        self._first_ranks = first_ranks
        self._lost_s = lost_s
        self._are_nodes = are_nodes
        self._newcomers = newcomers
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._sent: dict[str, Any] = {}
        # On member 0 everybody's; elsewhere this member's own, which each heartbeat carries.
        self._reports: list[Report] = []
        self._read = [0] * members
        self._heard: dict[int, int] = {}
        self._heard_at: dict[int, float] = {}
        self._root_cause: Crash | None = None
        self._finished: list[list[dict[str, Any]]] = []
        self._contact = time.monotonic()
        self._is_done = self._is_over = self._all_left = self._gone = False
        self._is_awaited = self.will_restart = self._is_stopping = False

    @property
    def is_lead(self) -> bool:
        """Whether this is member 0."""
        return self.member == 0

    @property
    def is_judged(self) -> bool:
        """Whether member 0 has said who failed first."""
        return self._root_cause is not None

    @property
    def is_headless(self) -> bool:
        """Whether member 0, and with it the store, is lost."""
        return not self.is_lead and self._lead_is_lost()

    def publish(self, key: str, value: Any) -> None:
        """Write a value that others wait for; member 0 does."""
        self.channel.put(key, {"nonces": self._nonces, "value": value})

    def wait_for(self, key: str, *, timeout_s: float) -> Any:
        """Wait for a value of member 0.

        Raises:
            TimeoutError: It did not publish it in time.
            ForgedMessageError: It did not write what stands there, or not for this member now: a
                message of an old run has another nonce.
        """
        self.channel.wait(key, timeout_s=timeout_s)
        content = read_message(self.channel, key, member_name(0))
        nonces = content["nonces"]
        if len(nonces) != self.members or [nonces[self.member]] != self._nonces:
            raise ForgedMessageError(f"{key}: was written for an earlier start of this node")
        return content["value"]

    def watch(self) -> None:
        """Start the thread that sends heartbeats and listens.

        From now on a thread alone uses the store: where the network is gone an operation may never
        return, and whoever waits for one could not end the ranks.
        """
        self._contact = time.monotonic()
        threading.Thread(target=self._listen, name="peers", daemon=True).start()

    def failure(self) -> bool:
        """Return whether a member has failed, or is lost."""
        if not self.is_lead:
            return self._root_cause is not None or self._lead_is_lost()
        with self._lock:
            watches = self._are_nodes or self._is_done
            return bool(self._reports) or self._gone or (watches and bool(self._lost()))

    def is_awaited(self) -> bool:
        """Return whether somebody waits to join; only member 0 knows."""
        return self._is_awaited

    def request_stop(self) -> None:
        """Let all members know that this one was asked to stop: none restarts what then fails."""
        self._is_stopping = True
        self._wake.set()

    def is_stopping(self) -> bool:
        """Return whether a member was asked to stop, as far as this one knows.

        With the root cause of a failure all know the same.
        """
        return self._is_stopping

    def report(self, report: Report) -> None:
        """Report a failure without waiting for the root cause."""
        with self._lock:
            self._reports.append(report)
        self._wake.set()

    def root_cause(self, reports: list[Report]) -> Crash:
        """Agree with the others on who failed first; ``reports`` are this member's failures."""
        for report in reports:
            self.report(report)
        return self._judge() if self.is_lead else self._await_root_cause(reports)

    def finish(self, finished: list[Finished], *, again: bool = False) -> list[Finished] | Crash:
        """Wait until all members have ended; return what all ranks reported, in their order.

        Args:
            finished: What this member's ranks reported.
            again: Whether all are to meet again, with newcomers; member 0 decides.
        """
        self.will_restart = again
        records = [dataclasses.asdict(record) for record in finished]
        self._send(f"done/{self.member}", records)
        self._is_done = True
        while not self._is_over:
            if self.failure():
                return self._judge() if self.is_lead else self._await_root_cause([])
            time.sleep(0.02)
        self.leave()
        return [Finished(**record) for node in self._finished for record in node] or finished

    def _judge(self) -> Crash:
        """Wait for what explains a failure, find the root cause, and publish it."""
        begun = time.monotonic()
        while True:
            with self._lock:
                reports, lost = [*self._reports], self._lost()
            waited = time.monotonic() - begun
            explained = lost or (is_conclusive(reports) and waited > _SETTLE_S)
            if explained or self._gone or waited > self._lost_s + 1:
                break
            time.sleep(0.02)
        if self._gone:
            reason = "the store by which it follows the others can't be used any more"
            reports.append(Report(rank=self._first_ranks[0], kind="connection", reason=reason))
        crash = find_root_cause([*reports, *(self._silence(member) for member in lost)])
        self._send("root_cause", {"crash": crash.to_json(), "is_stopping": self._is_stopping})
        self.leave()
        return crash

    def _await_root_cause(self, reports: list[Report]) -> Crash:
        """Wait for the root cause from member 0; where it never comes, member 0 is to blame."""
        deadline = time.monotonic() + 2 * self._lost_s + _SETTLE_S
        while self._root_cause is None and time.monotonic() < deadline and not self._lead_is_lost():
            time.sleep(0.02)
        if self._root_cause is None:
            return find_root_cause([*reports, self._silence(0)])
        self.leave()
        return self._root_cause

    def leave(self) -> None:
        """Leave, and on member 0 wait until the others have read the end: the store ends with it.

        Not long: one that is lost never reads it.
        """
        self._send(f"left/{self.member}", True)
        deadline = time.monotonic() + _LEAVE_S
        while not self._all_left and not self._gone and time.monotonic() < deadline:
            time.sleep(0.02)

    def _send(self, key: str, value: Any) -> None:
        """Hand a message to the thread that writes."""
        with self._lock:
            self._sent[key] = value
        self._wake.set()

    def _silence(self, member: int) -> Report:
        rank = self._first_ranks[member]
        which = "node" if self._are_nodes else "process"
        reason = f"no heartbeat from its {which}: killed, switched off, or off the network"
        return Report(rank=rank, kind="lost", reason=reason)

    def _lead_is_lost(self) -> bool:
        is_silent = time.monotonic() - self._contact > self._lost_s or bool(self._lost())
        return self._gone or is_silent

    def _lost(self) -> list[int]:
        now = time.monotonic()
        return [member for member, since in self._heard_at.items() if now - since > self._lost_s]

    def _listen(self) -> None:
        """Send heartbeats and messages, and listen, until the process ends."""
        count = 0
        try:
            while not self._all_left:
                count += 1
                self._wake.clear()
                self._send_heartbeat(count)
                self._flush()
                if self.is_lead:
                    self._poll_members()
                else:
                    self._poll_leader()
                self._contact = time.monotonic()
                self._wake.wait(_BEAT_S)
        except Exception:
            # Whatever it was, there is no store any more.
            self._gone = True

    def _send_heartbeat(self, count: int) -> None:
        """Send this member's heartbeat, with all that it has to report.

        Counts grow, so that an old heartbeat, put back by a stranger, is not taken for life.
        """
        with self._lock:
            reports = [] if self.is_lead else [report.to_json() for report in self._reports]
        message = heartbeat_message(count, reports=reports, is_stopping=self._is_stopping)
        self.channel.put(f"heartbeat/{self.member}", message)

    def _flush(self) -> None:
        """Write every message again: what a stranger wrote over one of them does not last."""
        with self._lock:
            sent = [*self._sent.items()]
        for key, value in sent:
            self.channel.put(key, value)
            if key == f"left/{self.member}" and not self.is_lead:
                self._all_left = True

    def _poll_leader(self) -> None:
        """Read what member 0 published."""
        if (root_cause := self._said("root_cause")) is not None:
            self._is_stopping |= root_cause["is_stopping"]
            self._root_cause = Crash.from_json(root_cause["crash"])
        elif self._is_done and (over := self._said("over")) is not None:
            self.will_restart = over == _AGAIN
            self._is_over = True
        elif self._is_done:  # the store may live on without member 0
            self._note_heartbeat(0, self._said("heartbeat/0"))

    def _note_heartbeat(self, member: int, heartbeat: Any | None) -> None:
        """Record a member's heartbeat, if it is new; members send them until they leave."""
        if heartbeat is not None and heartbeat["count"] > self._heard.get(member, -1):
            self._heard[member] = heartbeat["count"]
            self._heard_at[member] = time.monotonic()

    def _said(self, name: str) -> Any | None:
        """Return a message of member 0; None where there is none, or another's."""
        if not self.channel.check([name]):
            return None
        return self.channel.get_each({name: member_name(0)})[0]

    def _poll_members(self) -> None:
        """Read the others' heartbeats, reports and what they leave with."""
        others = range(1, self.members)
        heartbeats = self.channel.get_each(self._names("heartbeat", others))
        with self._lock:
            for member, heartbeat in zip(others, heartbeats, strict=True):
                if heartbeat is None:
                    continue
                self._note_heartbeat(member, heartbeat)
                self._is_stopping |= heartbeat["is_stopping"]
                new = heartbeat["reports"][self._read[member] :]
                self._reports += [Report.from_json(line) for line in new]
                self._read[member] += len(new)
        everyone = range(self.members)
        if self._is_done and not self._is_over:
            finished = self._all_of("done", everyone)
            if finished is not None:
                self._finished = finished
                self.channel.put("over", _AGAIN if self.will_restart else "ended")
                self._is_over = True
        if not self._is_done and not self._is_awaited:
            self._is_awaited = self._newcomers()
        with self._lock:
            left = [member for member in everyone if member not in self._lost()]
        self._all_left = self._all_of("left", left) is not None

    def _all_of(self, kind: str, members: Sequence[int]) -> list[Any] | None:
        """Return the messages of a kind; None until each of the members has written its own."""
        names = self._names(kind, members)
        if not self.channel.check([*names]):
            return None
        contents = self.channel.get_each(names)
        return None if None in contents else contents

    def _names(self, kind: str, members: Sequence[int]) -> dict[str, str]:
        return {f"{kind}/{member}": member_name(member) for member in members}
