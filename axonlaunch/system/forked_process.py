"""A process that a server forked, watched by the system rather than by the server.

The server is the parent of what it forks and the only one that learns how it ends. It is believed
when it speaks; nothing waits for it, for it may be stopped or killed.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from axonlaunch.system.process_state import state

_STATUS_S = 2.0
"""Seconds that the server gets to report how a process ended that has ended."""
_DYING_S = 10.0
"""Seconds that a killed process gets to be gone: one that waits for a dead disk never is."""


_CRASHED = (
    "compiled code failed, of torch or of another package: set PYTHONFAULTHANDLER=1 and run the "
    "command again to see where"
)
_WHAT_TO_TRY = {
    "SIGKILL": "the system may have run out of memory: end other programs, or ask for less",
    "SIGBUS": "a file that it read may have been cut short, or a disk is full: look at both, and "
    "run the command again",
    "SIGXCPU": "raise the limit of processor time (ulimit -t)",
    "SIGXFSZ": "raise the limit of file sizes (ulimit -f)",
    **dict.fromkeys(("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP"), _CRASHED),
}


class ProcessDiedError(RuntimeError):
    """A forked process ended without an answer.

    Attributes:
        task: What it was doing, as in "estimating memory".
        status: How it ended, negative for a signal; None if that is unknown.
    """

    def __init__(self, task: str, status: int | None) -> None:
        super().__init__(task, status)  # so that it pickles
        self.task = task
        self.status = status

    def __str__(self) -> str:
        died = f"a process died while {self.task}"
        if self.status is None:
            return f"{died}; how is unknown, as the fork server was ended or stopped: run it again"
        if self.status >= 0:
            return (
                f"{died}: it exited with status {self.status} and without an answer; look for a "
                "plug-in or a model's code that ends the process"
            )
        try:
            name = signal.Signals(-self.status).name
        except ValueError:
            name = "a real-time signal"
        remedy = _WHAT_TO_TRY.get(name, "another program ended it: run the command again")
        return f"{died}: signal {-self.status} ({name}); {remedy}"


def reason_of(error: Exception) -> str:
    """Return an error that a forked process raised, or left by dying, in one phrase."""
    return str(error) if isinstance(error, ProcessDiedError) else f"{type(error).__name__}: {error}"


class ForkedProcess:
    """A process that was started.

    Attributes:
        pid: Its number.
    """

    def __init__(self, process: BaseProcess, *, server: int | None) -> None:
        """Watch a process.

        Args:
            process: Started.
            server: The process that forked it; None where that is this one.
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
            # It has ended, or Linux is older than 5.3, or a container forbids it: then the server's
            # word is all there is.
            self._pidfd = None

    @property
    def sentinel(self) -> int:
        """A descriptor that can be read once the process has ended."""
        return self._process.sentinel if self._pidfd is None else self._pidfd

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more; it may be a zombie."""
        self._has_ended = self._has_ended or bool(wait([self.sentinel], timeout=0))
        return self._has_ended

    @property
    def exitcode(self) -> int | None:
        """How it ended, negative where a signal did it.

        None where it still runs, or where the server can't report it: it was stopped or killed.
        """
        if not self.has_ended:
            return None
        wait([self._process.sentinel], timeout=_STATUS_S)
        status = self._process.exitcode
        # Of a server that is gone multiprocessing makes 255.
        return None if status == 255 and not self._server_lives() else status

    def _server_lives(self) -> bool:
        return self._server is None or state(self._server) not in ("", "Z")

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if not self.has_ended:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    def kill_group(self) -> None:
        """Kill it and what it started; one that has made no group yet is killed alone."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.signal(signal.SIGKILL)

    def join(self, timeout: float | None = _DYING_S) -> None:
        """Wait for its end, and forget it."""
        if not self.has_ended and not wait([self.sentinel], timeout=timeout):
            return
        self._has_ended = True
        self._process.join(_STATUS_S)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
