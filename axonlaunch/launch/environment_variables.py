"""What launchers call the variables by which they give a process its place.

Names alone: it is read before anything else is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankVariables:
    """A launcher's variables; an empty name has none."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    run_id: str
    nnodes: str = ""
    node_rank: str = ""


OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
OPEN_MPI = RankVariables(
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE",
)
PMI = RankVariables(
    "mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_PORT"
)
SLURM = RankVariables(
    "srun",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "",
    "SLURM_JOB_ID",
    "SLURM_STEP_NUM_NODES",
    "SLURM_NODEID",
)
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True)
class LaunchIdentity:
    """What is the same in all starts of a run by its launcher or scheduler.

    Attributes:
        name: Of a SLURM job, or of the launcher's process; empty where neither is known.
        is_restart: Whether this is a later start.
        has_one_run: Whether nothing else is started under that name; a job may have several runs.
    """

    name: str = ""
    is_restart: bool = False
    has_one_run: bool = False

    @classmethod
    def detect(cls, environment: Mapping[str, str], *, launcher: str) -> LaunchIdentity:
        """Return what the environment says.

        Args:
            environment: ``os.environ``.
            launcher: What names the process that started this one; empty where it is not known.
        """
        job = environment.get("SLURM_JOB_ID")
        return cls(
            name=f"SLURM job {job}" if job else launcher,
            is_restart=any(environment.get(count, "0") != "0" for count in _RESTARTS),
            has_one_run=not job and launcher != "",
        )


UNKNOWN_LAUNCH = LaunchIdentity()
"""Of a run that nothing starts again."""


def may_be_rank(environment: Mapping[str, str]) -> bool:
    """Whether a launcher may have started this process as one rank, which starts no process."""
    local_ranks = ("LOCAL_RANK", OPEN_MPI.local_rank, PMI.local_rank, SLURM.local_rank)
    return any(environment.get(name) for name in local_ranks)
