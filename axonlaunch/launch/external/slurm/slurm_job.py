"""A submitted SLURM job: its submission, its state and log, and how it is stopped and resumed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.problems.errors import INVALID, TRANSIENT
from axonlaunch.launch.external.followed_job import JobState, decode_whole
from axonlaunch.system.storage.files import file_lock, read_text, replace_text

SCRIPT = "job.sbatch"
"""File in the run folder with the batch script."""
NUMBER = "job.number"
"""File in the run folder with the number of the last job."""
LOCK = "job.lock"
"""File in the run folder that a command locks while it submits the run."""
_UNKNOWN = "UNKNOWN"
"""State of a job that has ended in an unknown way."""
_STOPPED = "job.stopped"
"""File in the run folder with the number of the last job that was stopped."""
_UNREACHABLE = "UNREACHABLE"
"""State of a job while SLURM can't be queried."""
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
)
_NOTES = {
    str(INVALID): "failed (configuration error)",
    str(TRANSIENT): (
        "failed (a node was lost, or it could not start); resume it with axonlaunch resume {name}"
    ),
    "130": "is stopped; resume it with axonlaunch resume {name}",
}
"""Notes on failed jobs by the exit status of the command."""
_ANSWER_S = 60.0
"""Timeout of SLURM's programs in seconds. They wait while the controller is busy."""


@dataclass
class SlurmJob:
    """A submitted job.

    Attributes:
        folder: Run folder.
        number: Number of the job.
    """

    folder: Path
    number: str
    _read: int = 0

    @classmethod
    def of_folder(cls, folder: Path) -> SlurmJob | None:
        """Return the last job that was submitted in a run folder; None if there is none."""
        try:
            number = read_text(folder / NUMBER, at_most=64).strip()
        except (OSError, ValueError):
            return None
        return cls(folder, number) if number.isdigit() else None

    @property
    def name(self) -> str:
        """Name of the run that commands accept: its folder below ``runs``, otherwise its path."""
        folder, runs = self.folder.absolute(), Path("runs").absolute()
        return str(folder.relative_to(runs) if folder.is_relative_to(runs) else folder)

    @property
    def scheduler(self) -> str:
        """The job in words."""
        return f"SLURM job {self.number}"

    @property
    def run_dir(self) -> str:
        """Path of the run folder."""
        return str(self.folder.absolute())

    @property
    def log(self) -> Path:
        """Output of the job, with the log of rank 0."""
        return self.folder.absolute() / f"slurm-{self.number}.out"

    @property
    def left(self) -> str:
        """Line for the user after Ctrl-C, which does not end the job."""
        return f"job {self.number} is still running; log: {self.log}"

    def state(self) -> JobState:
        """Return the state, from the accounting if the controller has forgotten the job."""
        job = self.number
        answer, error = _ask("scontrol", "show", "job", job, "--oneliner")
        if match := re.search(r"\bJobState=(\w+)", answer):
            code = re.search(r"\bExitCode=(\d+:\d+)", answer)
            return self._state_of(match[1], code[1] if code else "")
        if "invalid job id" not in error.lower():
            reason = error or "scontrol reports nothing about it"
            note = f"job {job}: SLURM can't be queried ({reason}); still following its log"
            return JobState(_UNREACHABLE, note)
        options = ["--noheader", "--parsable2", "--allocations", "--format=State,ExitCode"]
        answer, error = _ask("sacct", *options, "-j", job)
        recorded_state, _, recorded_code = answer.partition("\n")[0].partition("|")
        name = recorded_state.partition(" ")[0]  # for example "CANCELLED by 1000"
        if name in _ENDED:
            return self._state_of(name, recorded_code)
        reason = error or (f"sacct reports {name}" if name else "sacct does not know it")
        note = (
            f"job {job} has ended with an unknown state: the controller does not know the job any "
            f"more, and {reason}; see {self.log}"
        )
        return JobState(_UNKNOWN, note, 1)

    def read_log(self, *, rank: int = 0) -> str:
        """Return what was added since the last call to the log of a rank."""
        log = self.folder / "logs" / f"rank_{rank}.log" if rank else self.log
        if not log.exists():
            return ""
        with log.open("rb") as stream:
            stream.seek(self._read)
            text, length = decode_whole(stream.read())
        self._read += length
        return text

    def stop(self) -> str:
        """Let the run save a checkpoint and end; return a line for the user.

        Raises:
            ConfigError: ``scancel`` failed, or the job has ended.
        """
        now = self.state()
        if now.status is not None:
            raise ConfigError([ConfigIssue("", now.note)])
        # The script lets its step save; scancel without a signal kills it after KillWait.
        has_begun = now.name not in ("PENDING", "CONFIGURING")
        signal = ["--batch", "--signal=USR2"] if has_begun else []
        replace_text(self.folder / _STOPPED, f"{self.number}\n")
        _, error = _ask("scancel", *signal, self.number)
        if error:
            (self.folder / _STOPPED).unlink()
            raise ConfigError([ConfigIssue("", f"job {self.number}: {error}")])
        does = "saves a checkpoint and ends" if has_begun else "is cancelled before its start"
        return f"job {self.number} {does}; resume it with axonlaunch resume {self.name}"

    def resume(self) -> str:
        """Submit the script of the run folder again; return a line for the user.

        Raises:
            ConfigError: ``sbatch`` failed, or the job has not ended.
        """
        with only_submission(self.folder):
            self.number = submit_script(self.folder)
        return f"job {self.number} submitted; it resumes in {self.folder}"

    def _state_of(self, name: str, code: str) -> JobState:
        if name == "PENDING":
            return JobState(name, f"job {self.number} is pending")
        if name not in _ENDED:
            return JobState(name)
        # The number before the colon is the exit status of the script, which is that of the run.
        status, _, number_of_signal = code.partition(":")
        ended = status if name == "FAILED" and number_of_signal == "0" else ""
        if name == "CANCELLED" and self._is_stopped():  # before its start
            ended = "130"
        if ended in _NOTES:
            note = _NOTES[ended].format(name=self.name)
            return JobState(name, f"job {self.number}: {note}", int(ended))
        if name == "COMPLETED" and code not in ("", "0:0"):
            return JobState(name, f"job {self.number}: completed with exit code {code}", 1)
        return JobState(name, f"job {self.number}: {name.lower()}", int(name != "COMPLETED"))

    def _is_stopped(self) -> bool:
        """Return whether ``axonlaunch stop`` has ended the job, and not ``scancel``."""
        try:
            return read_text(self.folder / _STOPPED, at_most=64).strip() == self.number
        except (OSError, ValueError):
            return False


@contextmanager
def only_submission(folder: Path) -> Iterator[None]:
    """Keep other commands from submitting a run, until the number of its job is written.

    Raises:
        ConfigError: Another command submits the run, an earlier job of it waits or runs, or the
            folder can't be locked.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(folder / LOCK))
        except BlockingIOError:
            message = "another command is submitting this run; axonlaunch jobs shows its job"
            problem = ConfigIssue("run_dir", message, str(folder), is_transient=True)
            raise ConfigError([problem]) from None
        except OSError as error:
            message = f"can't be submitted from here: {error.strerror}: {folder / LOCK}"
            raise ConfigError([ConfigIssue("run_dir", message, str(folder))]) from None
        refuse_second_job(folder)
        yield


def refuse_second_job(folder: Path) -> None:
    """Refuse to submit a run while an earlier job of its folder waits or runs.

    Raises:
        ConfigError: An earlier job waits or runs.
    """
    job = SlurmJob.of_folder(folder)
    state = None if job is None else job.state()
    if job is not None and state is not None and state.status is None:
        message = (
            f"job {job.number} of this folder is {state.name.lower()}; follow it with axonlaunch "
            f"logs {job.name} -f, or stop it with axonlaunch stop {job.name}"
        )
        raise ConfigError([ConfigIssue("run_dir", message, str(folder))])


def submit_script(folder: Path) -> str:
    """Submit the script of a run folder, and return the number of the job.

    Raises:
        ConfigError: ``sbatch`` failed.
    """
    command = ["sbatch", "--parsable", str(folder / SCRIPT)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        reason = " ".join(ran.stderr.replace("sbatch: error:", "").split())
        raise ConfigError([ConfigIssue("launch", f"sbatch failed: {reason}")])
    job = ran.stdout.strip().partition(";")[0]
    replace_text(folder / NUMBER, f"{job}\n")
    return job


def _ask(*command: str) -> tuple[str, str]:
    """Return the output of a SLURM program, and the reason if it fails."""
    program = command[0]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_ANSWER_S
        )
    except OSError:
        return "", f"there is no {program} here"
    except subprocess.TimeoutExpired:
        return "", f"{program} does not answer"
    if ran.returncode:
        return "", f"{program}: {' '.join(ran.stderr.split()) or f'exit status {ran.returncode}'}"
    return ran.stdout, ""
