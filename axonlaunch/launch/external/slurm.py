"""Runs a configuration as a SLURM job: writes the batch script, submits it and follows its log.

The job starts one process on each node, which reads SLURM's environment variables. If SLURM
requeues the job, the run resumes in the same folder.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from axonlaunch import config as configuration
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.options.launch import MOST_GRACE_S
from axonlaunch.config.problems.errors import INVALID, TRANSIENT, gathering
from axonlaunch.launch import run_dir
from axonlaunch.launch.external.followed_job import JobState, follow_job
from axonlaunch.launch.external.save_time import estimate_submitted, seconds_to_save
from axonlaunch.launch.launcher import (
    RESOLVED_SETTINGS,
    LaunchOptions,
    check_anywhere,
    submission_issues,
)
from axonlaunch.launch.multinode import token
from axonlaunch.system.exit_status import STATUSES
from axonlaunch.system.storage.files import file_lock, read_text, replace_text

SCRIPT = "job.sbatch"
JOB = "job.yaml"
TOKEN = "token"
NUMBER = "job.number"
"""File in the run folder with the number of the last job."""
_STOPPED = "job.stopped"
"""File in the run folder with the number of the last job that was stopped."""
_STATUSES = "job.statuses"
"""Folder in the run folder with the exit status of each node while the job ends."""
_LOCK = "job.lock"
"""File in the run folder that a command locks while it submits the run."""
_END = "END_OF_CONFIGURATION"
"""Line that ends the configuration in a script, which no YAML of a configuration contains."""
UNKNOWN = "UNKNOWN"
"""State of a job that has ended in an unknown way."""
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
_BEFORE_PROLOGUE = """\
# Shortly before the time limit: checkpoint and requeue. axonlaunch stop: checkpoint and end.
again= stopped= step= asked=
save() {
    [ -n "$step" ] && [ -z "$asked" ] || return
    asked=yes
    # A signal before the step exists would be lost, and a second one would end it at once.
    while ! squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i | grep -q '\\.[0-9]' &&
        kill -0 "$step" 2>/dev/null; do
        sleep 1
    done
    scancel --signal=TERM "$SLURM_JOB_ID"
}
trap 'again=yes; save' USR1
trap 'stopped=yes; save' USR2""".splitlines()
"""Start of the script: functions and traps."""
_AFTER_PROLOGUE = f"""\
[ -z "$stopped" ] || exit 130
# srun exits with the highest status, which may be that of a node which was ended after the failure.
# The nodes write theirs: SLURM sends signals only to its own child, which must not be a shell.
rm -rf "$statuses" && mkdir "$statuses"
export {STATUSES}="$statuses\"""".splitlines()
"""Lines before the command that starts the nodes."""
_AFTER_START = f"""\
step=$!
[ -z "$again$stopped" ] || save
while kill -0 "$step" 2>/dev/null; do # a trap ends the wait
    wait "$step"
done
wait "$step"
status=$?
if [ $status -ne 0 ]; then
    for each in {INVALID} 1 {TRANSIENT} 130; do
        cat "$statuses"/* | grep -qx $each && status=$each && break
    done
    # It was stopped before it could save.
    [ -n "$stopped" ] && [ $status -eq 143 ] && status=130
fi
rm -rf "$statuses"
if [ -n "$again" ] && [ -z "$stopped" ] && [ $status -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status""".splitlines()
"""End of the script: waits for the nodes and exits with the status that says most."""
_LEAST_GRACE_S = 120
"""Least number of seconds before the time limit at which a job is asked to save."""
_ANSWER_S = 60.0
"""Timeout of SLURM's programs in seconds. They wait while the controller is busy."""


def render(config: RunConfig, *, python: str = sys.executable, makes_folder: bool = False) -> str:
    """Return the batch script of a run with resolved ``name``, ``run_dir`` and ``launch.nproc``.

    Shortly before the time limit the job receives a signal, saves a checkpoint and requeues itself.
    A preempted job receives SIGTERM from SLURM, which also requeues it.

    Args:
        config: Configuration of the run.
        python: Python of the job.
        makes_folder: Whether the script makes the run folder with the configuration and the token
            of the nodes, so that ``sbatch`` accepts it anywhere. Its output is then in the working
            folder, because SLURM opens it before the script begins.
    """
    launch, folder, grace = config.launch, config.run_dir, config.launch.slurm.grace_s
    output = Path.cwd() if makes_folder else folder
    options = [
        f"--job-name={Path(config.name).name}",
        f"--nodes={launch.nnodes}",
        "--ntasks-per-node=1",
        f"--output={output}/slurm-%j.out",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{_LEAST_GRACE_S if grace == 'auto' else grace}",
    ]
    if launch.device == "cuda" or (launch.device == "auto" and launch.backend != "gloo"):
        devices = 1 if launch.backend == "gloo" else launch.nproc  # ranks share it with gloo
        options.append(f"--gpus-per-node={devices}")
    cpus = launch.slurm.cpus_per_task
    # Whole nodes come with all cores, but only with the memory that the job asks for.
    options += ["--exclusive", "--mem=0"] if cpus is None else [f"--cpus-per-task={cpus}"]
    if launch.slurm.partition:
        options.append(f"--partition={launch.slurm.partition}")
    if launch.slurm.account:
        options.append(f"--account={launch.slurm.account}")
    if launch.slurm.time:
        options.append(f"--time={launch.slurm.time}")
    command = [
        *(python, "-P", "-m", "axonlaunch", "train", "--config-dir", folder),
        *("--config-name", Path(JOB).stem, "launch.name=auto"),
    ]
    # sbatch splits these lines at blanks and handles quotes like a shell.
    options = [*map(shlex.quote, options), *launch.slurm.extra_args]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        "",
        f"statuses={shlex.quote(f'{folder}/{_STATUSES}')}",
        *_BEFORE_PROLOGUE,
        f"cd {shlex.quote(str(Path.cwd()))}",
        *(_making_folder(config) if makes_folder else []),
        *launch.slurm.prologue,
        *_AFTER_PROLOGUE,
        *([] if cpus is None else ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"]),
        f"srun --kill-on-bad-exit=1 --cpu-bind=none {shlex.join(command)} &",
        *_AFTER_START,
    ]
    return "\n".join(lines) + "\n"


def _making_folder(config: RunConfig) -> list[str]:
    """Return the lines of a script that write what a submission writes into the run folder."""
    folder = Path(config.run_dir)
    lines = [f"mkdir -p {shlex.quote(str(folder))}"]
    if config.launch.token_file is None:
        file = str(folder / TOKEN)
        config = configuration.with_values(config, {"launch.token_file": file})
        lines += [
            "# The secret that the nodes share.",
            f"[ -s {shlex.quote(file)} ] || "
            f"(umask 077; head -c 32 /dev/urandom | base64 > {shlex.quote(file)})",
        ]
    text = configuration.to_yaml(config)
    return [*lines, f"cat > {shlex.quote(str(folder / JOB))} <<'{_END}'", f"{text}{_END}"]


def check(config: RunConfig, options: LaunchOptions) -> RunConfig:
    """Run the checks that apply to every node with the run's devices, and check the submission.

    Raises:
        ConfigError: No such node can run the configuration, it can't be submitted here, or a
            setting that a job needs is missing.
    """
    issues = list(
        submission_issues(
            config.launch,
            target="job",
            run="a job",
            node="node",
            origin="SLURM sets it on each node",
            resolved=[key for key in RESOLVED_SETTINGS if key != "token_file"],
        )
    )
    if not issues:
        with gathering(issues):
            config = check_anywhere(config, options)
    if not options.render:
        if shutil.which("sbatch") is None:
            message = "there is no sbatch here; submit from a node of the cluster"
            issues.append(ConfigIssue("launch.name", message, "slurm"))
        with gathering(issues):
            # A running job locks its folder: say that first. A waiting job does not, and
            # checkpoint.overwrite would move its folder aside.
            if not issues:
                refuse_second_job(Path(run_dir.with_run_dir(config).run_dir))
            run_dir.check_run_dir(config)
    if issues:
        raise ConfigError(issues)
    return config


def launch(config: RunConfig, options: LaunchOptions) -> tuple[int, dict[str, Any] | None]:
    """Submit a run and follow it to its end, or print its script.

    Args:
        config: Configuration returned by ``check``.
        options: Options of the launch.

    Returns:
        The exit status and the job's number, folder and last state; None instead of the latter if
        the script was printed.

    Raises:
        ConfigError: ``sbatch`` failed.
    """
    if config.launch.slurm.grace_s == "auto":
        grace = _estimated_grace_s(config, options.fork_server)
        config = configuration.with_values(config, {"launch.slurm.grace_s": grace})
    if options.render:
        print(render(run_dir.with_run_dir(config), makes_folder=True), end="")
        return 0, None
    output = sys.stderr if options.as_json else sys.stdout
    return submit(config, announce=lambda text: print(text, file=output))


def _estimated_grace_s(config: RunConfig, context: ForkServerContext) -> int:
    """Return the seconds that a node needs to finish a step and save; note if they are unknown."""
    try:
        estimate = estimate_submitted(config, context)
    except ConfigError as error:
        needed = _LEAST_GRACE_S
        sys.stderr.write(
            f"note: launch.slurm.grace_s={needed}, because the run can't be estimated: "
            f"{error.problems[0]}\n"
        )
    else:
        needed = max(_LEAST_GRACE_S, seconds_to_save(config, estimate))
    return min(needed, _most_grace_s(config, needed))


def _most_grace_s(config: RunConfig, needed: int) -> int:
    """Return the longest grace period with time for steps before it; note if more is needed."""
    limit = config.launch.slurm.limit_s
    most = MOST_GRACE_S if limit is None else min(MOST_GRACE_S, max(1, limit // 2))
    if most < needed:
        bound = f"of launch.slurm.time={config.launch.slurm.time}" if limit else "SLURM allows"
        sys.stderr.write(
            f"note: launch.slurm.grace_s={most}, the most {bound}; a checkpoint may need "
            f"{needed} s\n"
        )
    return most


def submit(config: RunConfig, *, announce: Callable[[str], None]) -> tuple[int, dict[str, Any]]:
    """Submit a run and follow its log until the job ends.

    Ctrl-C stops following the log, but does not end the job.

    Args:
        config: Checked configuration with resolved ``launch.nproc``.
        announce: Receives lines for the user.

    Returns:
        The exit status, and the job's number, folder and last state.

    Raises:
        ConfigError: ``sbatch`` failed. A run folder that was made for the job is removed.
    """
    # Again, because earlier runs of a sweep may have taken hours: before checkpoint.overwrite moves
    # the folder of a job that another command has submitted meanwhile.
    planned = Path(run_dir.with_run_dir(config).run_dir)
    refuse_second_job(planned)
    is_new = not planned.exists()
    with ExitStack() as submission:
        with run_dir.open_run_dir(config, announce=announce, is_submitted=True) as config:
            folder = Path(config.run_dir)
            submission.enter_context(_only_submission(folder))
            _write(config, folder)
        # The job, which may begin at once, locks the folder itself.
        try:
            job = _submit_script(folder)
        except ConfigError:
            if is_new:
                _remove_submission(folder)
            raise
    announce(f"job {job} submitted; scancel {job} ends it, Ctrl-C here only stops following it")
    status, state = follow_job(SlurmJob(folder, job), announce)
    return status, {"job_id": int(job), "run_dir": config.run_dir, "state": state}


@contextmanager
def _only_submission(folder: Path) -> Iterator[None]:
    """Keep other commands from submitting a run, until the number of its job is written.

    Raises:
        ConfigError: Another command submits the run, an earlier job of it waits or runs, or the
            folder can't be locked.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(folder / _LOCK))
        except BlockingIOError:
            message = "another command is submitting this run; axonlaunch jobs shows its job"
            problem = ConfigIssue("run_dir", message, str(folder), is_transient=True)
            raise ConfigError([problem]) from None
        except OSError as error:
            message = f"can't be submitted from here: {error.strerror}: {folder / _LOCK}"
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


def _submit_script(folder: Path) -> str:
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


def _write(config: RunConfig, folder: Path) -> None:
    if config.launch.token_file is None:
        # The run folder is on a file system shared by the nodes of the job.
        token.create_token(folder / TOKEN)
        config = configuration.with_values(
            config, {"launch.token_file": str((folder / TOKEN).absolute())}
        )
    replace_text(folder / JOB, configuration.to_yaml(config))
    replace_text(folder / SCRIPT, render(config))


def _remove_submission(folder: Path) -> None:
    """Remove a run folder that has only the files of a submission."""
    for name in (SCRIPT, JOB, TOKEN, _LOCK):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # something else is in it
        (folder / "logs").rmdir()
        folder.rmdir()


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
        return JobState(UNKNOWN, note, 1)

    def read_log(self, *, rank: int = 0) -> str:
        """Return what was added since the last call to the log of a rank."""
        log = self.folder / "logs" / f"rank_{rank}.log" if rank else self.log
        if not log.exists():
            return ""
        with log.open("rb") as stream:
            stream.seek(self._read)
            content = stream.read()
        self._read += len(content)
        return content.decode(errors="replace")

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
        with _only_submission(self.folder):
            self.number = _submit_script(self.folder)
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
