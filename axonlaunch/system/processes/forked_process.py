"""A process that a fork server started, watched through the operating system.

The server is the parent of the processes that it forks, so only it learns their exit status. This
module uses the reported status, but never waits for the server without a timeout, because the
server may be stopped or killed.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from axonlaunch.system.processes.death_signals import cause_and_remedy, signal_name
from axonlaunch.system.processes.process_state import state

_STATUS_S = 2.0
"""Seconds to wait for the server's report of the exit status of a process that has ended."""
_DYING_S = 10.0
"""Seconds to wait for the end of a killed process. A process that waits for a dead disk never
ends."""


class ProcessDiedError(RuntimeError):
    """A forked process ended without an answer.

    Attributes:
        task: Task of the process, such as "estimating memory".
        status: Exit status, negative for a signal; None if unknown.
    """

    def __init__(self, task: str, status: int | None) -> None:
        super().__init__(task, status)  # makes the exception picklable
        self.task = task
        self.status = status

    def __str__(self) -> str:
        died = f"a process died while {self.task}"
        if self.status is None:
            return (
                f"{died}; its status is unknown, because the fork server was ended or stopped: run "
                "the command again"
            )
        if self.status >= 0:
            return (
                f"{died}: it exited with status {self.status} and without an answer; look for a "
                "plug-in or a model's code that ends the process"
            )
        number = -self.status
        return f"{died}: signal {number} ({signal_name(number)}); {cause_and_remedy(number)}"


def reason_of(error: Exception) -> str:
    """Return the error of a forked process as one phrase."""
    return str(error) if isinstance(error, ProcessDiedError) else f"{type(error).__name__}: {error}"


class ForkedProcess:
    """A process that was started by a fork server or by this process.

    Attributes:
        pid: Process id.
    """

    def __init__(self, process: BaseProcess, *, server: int | None) -> None:
        """Watch a process.

        Args:
            process: Started process.
            server: Process id of the server that forked it; None if this process started it.
        """
        assert process.pid is not None
        self.pid = process.pid
        self._process = process
        self._server = server
        self._has_ended = False
        self._pidfd: int | None = None
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            # The process has ended, Linux is older than 5.3, or a container forbids it. Then only
            # the server can report the end.
            self._pidfd = None

    @property
    def sentinel(self) -> int:
        """File descriptor that becomes readable when the process has ended."""
        return self._process.sentinel if self._pidfd is None else self._pidfd

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; it may still be a zombie."""
        self._has_ended = self._has_ended or bool(wait([self.sentinel], timeout=0))
        return self._has_ended

    @property
    def exitcode(self) -> int | None:
        """Exit status, negative for a signal.

        None if the process still runs, or if the server was stopped or killed and can't report.
        """
        if not self.has_ended:
            return None
        wait([self._process.sentinel], timeout=_STATUS_S)
        status = self._process.exitcode
        # multiprocessing reports 255 if the server is gone.
        return None if status == 255 and not self._server_lives() else status

    def _server_lives(self) -> bool:
        return self._server is None or state(self._server) not in ("", "Z")

    def signal(self, number: int) -> None:
        """Send a signal to the process unless it has ended."""
        if not self.has_ended:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    def kill_group(self) -> None:
        """Kill the process and its process group; only the process if it has no group yet."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.signal(signal.SIGKILL)

    def join(self, timeout: float | None = _DYING_S) -> None:
        """Wait for the end of the process and release its resources."""
        if not self.has_ended and not wait([self.sentinel], timeout=timeout):
            return
        self._has_ended = True
        self._process.join(_STATUS_S)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
