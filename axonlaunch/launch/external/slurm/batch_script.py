"""Writes the batch script of a SLURM job.

The job starts one process on each node, which reads SLURM's environment variables. If SLURM
requeues the job, the run resumes in the same folder.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from axonlaunch import config as configuration
from axonlaunch.config import RunConfig
from axonlaunch.config.options.launch import SlurmConfig
from axonlaunch.config.problems.errors import INVALID, TRANSIENT
from axonlaunch.system.exit_status import STATUSES

JOB = "job.yaml"
"""File in the run folder with the configuration of the job."""
TOKEN = "token"
"""File in the run folder with the secret that the nodes share."""
LEAST_GRACE_S = 120
"""Least number of seconds before the time limit at which a job is asked to save."""
_STATUSES = "job.statuses"
"""Folder in the run folder with the exit status of each node while the job ends."""
_END = "END_OF_CONFIGURATION"
"""Line that ends the configuration in a script, which no YAML of a configuration contains."""
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
    slurm, folder = config.launch.slurm, config.run_dir
    options = _sbatch_options(config, output=Path.cwd() if makes_folder else Path(folder))
    command = [
        *(python, "-P", "-m", "axonlaunch", "train", "--config-dir", folder),
        *("--config-name", Path(JOB).stem, "launch.name=auto"),
    ]
    has_cores = slurm.cpus_per_task is not None
    cores = ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"] if has_cores else []
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        "",
        f"statuses={shlex.quote(f'{folder}/{_STATUSES}')}",
        *_BEFORE_PROLOGUE,
        f"cd {shlex.quote(str(Path.cwd()))}",
        *(_folder_lines(config) if makes_folder else []),
        *slurm.prologue,
        *_AFTER_PROLOGUE,
        *cores,
        f"srun --kill-on-bad-exit=1 --cpu-bind=none {shlex.join(command)} &",
        *_AFTER_START,
    ]
    return "\n".join(lines) + "\n"


def _sbatch_options(config: RunConfig, *, output: Path) -> list[str]:
    """Return the options of ``sbatch``, quoted as its lines in a script are."""
    launch, slurm = config.launch, config.launch.slurm
    grace = LEAST_GRACE_S if slurm.grace_s == "auto" else slurm.grace_s
    options = [
        f"--job-name={Path(config.name).name}",
        f"--nodes={launch.nnodes}",
        "--ntasks-per-node=1",
        f"--output={output}/slurm-%j.out",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{grace}",
    ]
    if launch.device == "cuda" or (launch.device == "auto" and launch.backend != "gloo"):
        devices = 1 if launch.backend == "gloo" else launch.nproc  # ranks share it with gloo
        options.append(f"--gpus-per-node={devices}")
    options += _cores_and_memory(slurm)
    requested = {"partition": slurm.partition, "account": slurm.account, "time": slurm.time}
    options += [f"--{name}={value}" for name, value in requested.items() if value]
    # sbatch splits these lines at blanks and handles quotes like a shell.
    return [*map(shlex.quote, options), *slurm.extra_args]


def _cores_and_memory(slurm: SlurmConfig) -> list[str]:
    """Return the options that give a job its cores and memory.

    Whole nodes come with all cores, but only with the memory that the job asks for.
    """
    cpus = slurm.cpus_per_task
    return ["--exclusive", "--mem=0"] if cpus is None else [f"--cpus-per-task={cpus}"]


def _folder_lines(config: RunConfig) -> list[str]:
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
