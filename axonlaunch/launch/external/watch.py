"""Watches the launcher, the other ranks and this rank in a thread during training.

After a failure the thread agrees with the other ranks on the first failure and ends the process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from typing import NoReturn, TextIO

from axonlaunch.config import RunConfig
from axonlaunch.launch.environment.launcher_process import LauncherProcess
from axonlaunch.launch.failures import hang
from axonlaunch.launch.failures.outcome import Outcome
from axonlaunch.launch.failures.pauses import Pauses
from axonlaunch.launch.failures.report import Crash, FailureKind, Report, report_of_rank
from axonlaunch.launch.failures.root_cause import find_root_cause
from axonlaunch.launch.local.messages import RankSpec
from axonlaunch.launch.multinode.coordination import Coordinator
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.launch.output.summary import LogTail, RunRecorder, finish_run, report_crash

_TICK_S = 0.1


class JobWatch(threading.Thread):
    """Thread that watches this rank and the others, and ends the process after a failure."""

    def __init__(
        self,
        config: RunConfig,
        spec: RankSpec,
        peers: Coordinator,
        launcher: LauncherProcess,
        record: RunRecorder,
        console: RunConsole,
        errors: TextIO,
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self._config = config
        self._spec = spec
        self._peers = peers
        self._launcher = launcher
        self._record = record
        self._console = console
        self._errors = errors
        self._over = threading.Event()
        self._pauses = Pauses()
        self._tail = LogTail(spec.log, console) if spec.rank == 0 else None

    def end(self) -> None:
        """Stop watching, because every rank has finished successfully."""
        self._over.set()
        self.join()
        if self._tail:
            self._tail()

    def run(self) -> None:
        """Watch until the end. An error in this thread ends the process."""
        try:
            self._follow()
        except BaseException as error:
            # Without this thread the training thread might wait forever.
            traceback.print_exception(error, file=self._errors)
            os._exit(1)

    def _follow(self) -> None:
        while not self._pauses.watch(lambda: self._over.wait(_TICK_S)):
            if self._tail:
                self._tail()
            if self._launcher.is_gone.is_set():
                self._fail_without_launcher()
            elif self._peers.failure():
                self._fail([])
            elif (report := self._hang()) is not None:
                self._fail([report])

    def _hang(self) -> Report | None:
        spec, heartbeat = self._spec, self._spec.heartbeats.read(self._spec.local_rank)
        timeout_s = self._config.launch.timeout_s
        if heartbeat.phase == "done" or self._pauses.running_since(heartbeat.at) < timeout_s:
            return None
        this_process = {spec.local_rank: os.getpid()}
        location = hang.ask(this_process, {spec.local_rank: spec.log})[spec.local_rank]
        return location.to_report(self._report("hang"), timeout_s=timeout_s)

    def _report(self, kind: FailureKind, reason: str = "") -> Report:
        spec = self._spec
        heartbeat = spec.heartbeats.read(spec.local_rank)
        return report_of_rank(
            spec.rank, kind, reason, log=spec.log, step=heartbeat.step, doing=heartbeat.phase
        )

    def _fail_without_launcher(self) -> NoReturn:
        """End because the launcher has ended, without agreement: the store may have been its."""
        name, pid = self._launcher.name, self._launcher.pid
        reason = f"its launcher {name} (process {pid}) is gone: it was killed or ran out of memory"
        report = self._report("lost", reason)
        self._peers.report(report)  # the ranks of other nodes may learn of it
        time.sleep(_TICK_S)
        self._end(find_root_cause([report]), reports=self._spec.rank == 0)

    def _fail(self, reports: list[Report]) -> NoReturn:
        """Agree on the first failure, report it on rank 0, and end this process."""
        crash = self._peers.root_cause(reports)
        if self._launcher.is_gone.is_set():  # the failure is a consequence of that
            self._fail_without_launcher()
        self._end(crash, reports=self._spec.rank == 0 or not self._peers.is_judged)

    def _end(self, crash: Crash, *, reports: bool) -> NoReturn:
        """End this process. Rank 0 writes the run's summary first."""
        if self._spec.rank == 0:
            self._console.stop()
            sys.stderr = self._errors
            finish_run(self._config, Outcome(crash=crash), self._record, self._console)
        elif reports:
            sys.stderr = self._errors  # rank 0 is gone and reports nothing
            report_crash(self._config, crash)
        sys.stderr.flush()
        self._record.prediction.close()
        os._exit(1)
