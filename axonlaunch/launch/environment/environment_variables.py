"""Names of the environment variables with which launchers describe a process's rank.

This module is imported before everything else, so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RankVariables:
    """Names of a launcher's variables; empty if the launcher has no such variable."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    run_id: str
    nnodes: str = ""
    node_rank: str = ""


RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
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


@dataclass(frozen=True)
class NodeVariables:
    """Names of the variables of a tool that starts one process on each node.

    Attributes:
        launcher: Name of the tool.
        nnodes: Number of nodes.
        node_rank: Number of this node.
        address: Address of node 0, or addresses of all nodes on separate lines.
        port: Port on node 0; empty if the tool sets none.
        nproc: Number of ranks on each node; empty if the tool sets none.
        gpus: Number of GPUs of each node, 0 or not set without; empty if the tool does not say.
        run_id: Identifies the run on all of its nodes; empty if there is ``port``.
    """

    launcher: str
    nnodes: str
    node_rank: str
    address: str
    port: str = ""
    nproc: str = ""
    gpus: str = ""
    run_id: str = ""


NODE_VARIABLES = (
    NodeVariables(
        "Kubeflow Trainer",
        "PET_NNODES",
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
        "PET_NPROC_PER_NODE",
    ),
    NodeVariables(
        "SkyPilot",
        "SKYPILOT_NUM_NODES",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NODE_IPS",
        gpus="SKYPILOT_NUM_GPUS_PER_NODE",
        run_id="SKYPILOT_TASK_ID",
    ),
    NodeVariables(
        "dstack",
        "DSTACK_NODES_NUM",
        "DSTACK_NODE_RANK",
        "DSTACK_MASTER_NODE_IP",
        gpus="DSTACK_GPUS_PER_NODE",
        run_id="DSTACK_RUN_ID",
    ),
)
COMPLETION_INDEX = "JOB_COMPLETION_INDEX"
"""Number of a pod of a Kubernetes Job with ``completionMode: Indexed``."""
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True)
class LaunchIdentity:
    """Identifies a run across all its starts by a launcher or scheduler.

    Attributes:
        name: Name of the SLURM job or of the launcher's process; empty if neither is known.
        is_restart: Whether this is not the first start.
        has_one_run: Whether only one run is started under this name. A SLURM job may start several.
    """

    name: str = ""
    is_restart: bool = False
    has_one_run: bool = False

    @classmethod
    def detect(cls, environment: Mapping[str, str], *, launcher: str) -> LaunchIdentity:
        """Read the identity from environment variables.

        Args:
            environment: Environment variables, such as ``os.environ``.
            launcher: Name of the process that started this one; empty if unknown.
        """
        job = environment.get("SLURM_JOB_ID")
        return cls(
            name=f"SLURM job {job}" if job else launcher,
            is_restart=any(environment.get(count, "0") != "0" for count in _RESTARTS),
            has_one_run=not job and launcher != "",
        )


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables by which a launcher describes a process."""
    prefixes = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "PET_", "SKYPILOT_", "DSTACK_", "TORCHELASTIC_")
    names = {*RANK_VARIABLES, *ADDRESS, "LOCAL_WORLD_SIZE", COMPLETION_INDEX}
    return {
        name: value
        for name, value in environment.items()
        if name not in names and not name.startswith(prefixes)
    }


SUBMISSION = "AXONLAUNCH_SUBMISSION"
"""Names the submission of a run to Ray, on its nodes."""
POD_SUBMISSION = "/run/axonlaunch/config/submission"
"""File that names the submission of a run to Kubernetes, in its pods."""


def submission_of(environment: Mapping[str, str]) -> str:
    """Return a name that all starts of a run by its scheduler share; empty if there is none.

    A scheduler may start a run again on another node.
    """
    if job := environment.get("SLURM_JOB_ID"):
        return f"SLURM job {job} of {environment.get('SLURM_CLUSTER_NAME', 'a cluster')}"
    for name in (SUBMISSION, *(names.run_id for names in NODE_VARIABLES if names.run_id)):
        if environment.get(name):
            return f"{name} {environment[name]}"
    try:
        return f"pods {Path(POD_SUBMISSION).read_text()}"
    except (OSError, ValueError):
        return ""


UNKNOWN_LAUNCH = LaunchIdentity()
"""Identity of a run that no launcher or scheduler restarts."""


def may_be_rank(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher may have started this process as one rank.

    Such a process starts no other ranks.
    """
    local_ranks = ("LOCAL_RANK", OPEN_MPI.local_rank, PMI.local_rank, SLURM.local_rank)
    return any(environment.get(name) for name in local_ranks)
