"""Coordinates the members of a run over torch's store: heartbeats, failures and results.

Members are nodes, or ranks that another launcher started. Each member sends heartbeats. Member 0
collects failures and determines which was first. All messages are signed JSON; a message that was
not written by the named member is ignored.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from axonlaunch.comm.connection.authenticated_store import Channel
from axonlaunch.events import Finished
from axonlaunch.launch.failures.report import Crash, Report
from axonlaunch.launch.failures.root_cause import find_root_cause, is_conclusive
from axonlaunch.launch.multinode.handshake import (
    EarlierStartError,
    heartbeat_message,
    member_name,
    read_message,
)

_BEAT_S, _POLL_S = 0.3, 0.05
_LEAVE_S = 2.0
_AGAIN, _PREPARING = "again", "preparing"
_SETTLE_S = 1.5
"""Seconds that member 0 waits for reports of other members after the first failure."""


class Coordinator:
    """One member of a run. Member 0 leads.

    Most of the code is the same for member 0 and the others. Example: in a run on two nodes a rank
    of node 1 crashes. These keys are written to the store:

        heartbeat/0, /1   both, every 0.3 s: a count, the member's failures, and whether it received
                          a stop request
        heartbeat/1       member 1: with the report of its rank, when it is known
        root_cause        member 0, when it has collected reports: the first failure and its reason
        left/1, left/0    both, when they have read it and end; member 0 waits for the others,
                          because it hosts the store

    In a run that succeeds the keys are ``done/0`` and ``done/1`` with the results of ranks, then
    ``over`` from member 0, then ``left``. Only member 0 uses ``_judge``, ``_poll_members`` and
    ``_all_of``. Only the others use ``_await_root_cause``, ``_poll_leader`` and
    ``_leader_message``.

    Attributes:
        channel: Channel between the members, in the run's part of the store.
        member: Number of this member; 0 leads.
        members: Number of members.
        will_restart: Whether the members meet again with new ones; valid after all have ended.
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
        """Prepare a member. Heartbeats begin with ``watch``.

        Args:
            channel: Channel between the members; used only by this object.
            nonces: Nonces from ``handshake``: those of all members on member 0, otherwise only that
                of this member.
            member: Number of this member.
            members: Number of members.
            first_ranks: First rank of each member.
            lost_s: Seconds of silence after which a member is lost.
            are_nodes: Whether members are processes that only supervise a node's ranks. Their
                silence fails the run. A member that is a rank may be silent while it works; until
                all ranks are done, its silence only explains the failure of another rank.
            newcomers: Returns whether a new member waits that can join. Only member 0 calls it, in
                its listening thread.
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
        # On member 0 the reports of all members; otherwise those of this member, which each
        # heartbeat contains.
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
        """Whether member 0 has determined the first failure."""
        return self._root_cause is not None

    @property
    def is_headless(self) -> bool:
        """Whether member 0 is lost, and with it the store."""
        return not self.is_lead and self._lead_is_lost()

    def publish(self, key: str, value: Any) -> None:
        """Publish a value for the other members. Only member 0 calls this."""
        self.channel.put(key, {"nonces": self._nonces, "value": value})

    def call_off(self, reason: dict[str, Any]) -> None:
        """Tell the others, instead of the configuration, why no rank starts; then leave.

        Args:
            reason: Message that they get as ``frozen``.
        """
        self.publish("frozen", reason)
        self.watch()
        self.leave()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Tell members that wait for a value that member 0 lives, until the block ends.

        Only member 0 calls this, and no other method in the block.
        """
        is_over = threading.Event()

        def beat() -> None:
            # If the store fails, so does the next use of it.
            with suppress(dist.DistNetworkError, dist.DistStoreError):
                for count in itertools.count(1):
                    self.channel.put(_PREPARING, count)
                    if is_over.wait(_BEAT_S):
                        return

        thread = threading.Thread(target=beat, name="preparing", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def wait_for(
        self, key: str, *, timeout_s: float, confirm: Callable[[], None] = lambda: None
    ) -> Any:
        """Wait for a value of member 0.

        Args:
            key: Name of the value.
            timeout_s: Seconds to wait. They begin again with each sign that member 0 is preparing.
            confirm: Function that is called repeatedly; it raises if the value can't come any more.

        Raises:
            TimeoutError: Member 0 neither published the value nor gave a sign in time.
            EarlierStartError: The value is from another start of the member: a message from
                an old run has another nonce.
            ForgedMessageError: The message was not written by member 0.
        """
        now = time.monotonic()
        deadline, look_at, signs = now + timeout_s, now, 0
        while not self.channel.check([key]):
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _BEAT_S
                count = self._leader_message(_PREPARING) or 0
                if count > signs:
                    deadline, signs = now + timeout_s, count
            if now > deadline:
                raise TimeoutError(f"{key}: not published within {timeout_s:g} s")
            confirm()
            time.sleep(_POLL_S)
        content = read_message(self.channel, key, member_name(0))
        nonces = content["nonces"]
        if len(nonces) != self.members or [nonces[self.member]] != self._nonces:
            raise EarlierStartError(f"{key}: was written for an earlier start of this node")
        return content["value"]

    def watch(self) -> None:
        """Start the thread that sends heartbeats and listens.

        From now on only this thread uses the store. If the network is gone, a store operation may
        never return, and a thread that waits for it could not end the ranks.
        """
        self._contact = time.monotonic()
        threading.Thread(target=self._listen, name="peers", daemon=True).start()

    def failure(self) -> bool:
        """Return whether a member has failed or is lost."""
        if not self.is_lead:
            return self._root_cause is not None or self._lead_is_lost()
        with self._lock:
            watches = self._are_nodes or self._is_done
            return bool(self._reports) or self._gone or (watches and bool(self._lost()))

    def is_awaited(self) -> bool:
        """Return whether a new member waits to join. Only member 0 knows this."""
        return self._is_awaited

    def request_stop(self) -> None:
        """Tell all members about a stop request, so that none restarts after a failure."""
        self._is_stopping = True
        self._wake.set()

    def is_stopping(self) -> bool:
        """Return whether any member is known to have received a stop request.

        After the root cause of a failure is published, the result is the same on all members.
        """
        return self._is_stopping

    def report(self, report: Report) -> None:
        """Report a failure without waiting for the root cause."""
        with self._lock:
            self._reports.append(report)
        self._wake.set()

    def root_cause(self, reports: list[Report]) -> Crash:
        """Agree with the others on the first failure; ``reports`` are those of this member."""
        for report in reports:
            self.report(report)
        return self._judge() if self.is_lead else self._await_root_cause(reports)

    def finish(self, finished: list[Finished], *, again: bool = False) -> list[Finished] | Crash:
        """Wait until all members have ended, and return the results of all ranks in rank order.

        Args:
            finished: Results of this member's ranks.
            again: Whether all members meet again with new ones; the value on member 0 counts.
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
        """Wait for reports that explain a failure, find the root cause, and publish it."""
        began = time.monotonic()
        while True:
            with self._lock:
                reports, lost = [*self._reports], self._lost()
            waited = time.monotonic() - began
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
        """Wait for the root cause from member 0; if it does not come, member 0 is the cause."""
        deadline = time.monotonic() + 2 * self._lost_s + _SETTLE_S
        while self._root_cause is None and time.monotonic() < deadline and not self._lead_is_lost():
            time.sleep(0.02)
        if self._root_cause is None:
            return find_root_cause([*reports, self._silence(0)])
        self.leave()
        return self._root_cause

    def leave(self) -> None:
        """Leave the run. Member 0 hosts the store, so it waits until others have read the end.

        The wait is short, because a lost member never reads it.
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
            # After any error the store counts as gone.
            self._gone = True

    def _send_heartbeat(self, count: int) -> None:
        """Send this member's heartbeat with its reports.

        Counts increase, so an old heartbeat that an attacker restores does not count.
        """
        with self._lock:
            reports = [] if self.is_lead else [report.to_json() for report in self._reports]
        message = heartbeat_message(count, reports=reports, is_stopping=self._is_stopping)
        self.channel.put(f"heartbeat/{self.member}", message)

    def _flush(self) -> None:
        """Write all sent messages again, in case an attacker has overwritten some."""
        with self._lock:
            sent = [*self._sent.items()]
        for key, value in sent:
            self.channel.put(key, value)
            if key == f"left/{self.member}" and not self.is_lead:
                self._all_left = True

    def _poll_leader(self) -> None:
        """Read the messages of member 0."""
        if (root_cause := self._leader_message("root_cause")) is not None:
            self._is_stopping |= root_cause["is_stopping"]
            self._root_cause = Crash.from_json(root_cause["crash"])
        elif self._is_done and (over := self._leader_message("over")) is not None:
            self.will_restart = over == _AGAIN
            self._is_over = True
        elif self._is_done:  # the store may live on without member 0
            self._note_heartbeat(0, self._leader_message("heartbeat/0"))

    def _note_heartbeat(self, member: int, heartbeat: Any | None) -> None:
        """Record a member's heartbeat if it is new."""
        if heartbeat is not None and heartbeat["count"] > self._heard.get(member, -1):
            self._heard[member] = heartbeat["count"]
            self._heard_at[member] = time.monotonic()

    def _leader_message(self, name: str) -> Any | None:
        """Return a message of member 0; None if it is missing or was written by another."""
        if not self.channel.check([name]):
            return None
        return self.channel.get_each({name: member_name(0)})[0]

    def _poll_members(self) -> None:
        """Read the heartbeats, reports, results and leave messages of other members."""
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
        """Return a message of a kind from each member; None until all have written it."""
        names = self._names(kind, members)
        if not self.channel.check([*names]):
            return None
        contents = self.channel.get_each(names)
        return None if None in contents else contents

    def _names(self, kind: str, members: Sequence[int]) -> dict[str, str]:
        return {f"{kind}/{member}": member_name(member) for member in members}
