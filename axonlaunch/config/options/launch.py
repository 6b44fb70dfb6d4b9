"""Typed configuration of launchers, and the registry of launchers.

``axonlaunch.launch`` starts the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from axonlaunch.config.registry import Entry, Registry

MOST_GRACE_S = 65535
"""Largest number of seconds of sbatch's option ``--signal``."""
_TIME_LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
"""Format of sbatch's option ``--time``: minutes[:seconds], or [days-]hours[:minutes[:seconds]]."""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """Options of sbatch for launch=slurm; launch.nnodes and launch.nproc set nodes and ranks."""

    partition: str | None = None
    """partition of the job; null: the default of the cluster"""
    account: str | None = None
    """account that the job is charged to; null: the default of the user"""
    time: str | None = None
    """time limit in sbatch's format: 30 (minutes), 8:00:00, 2-0 (days-hours)"""
    grace_s: int | Literal["auto"] = field(default="auto", metadata={"min": 1, "max": MOST_GRACE_S})
    """seconds before the time limit at which the run is checkpointed and requeued; auto: from the
    estimate, a minute and a checkpoint at 100 MB/s, at least 120, at most half of the time limit
    """
    cpus_per_task: int | None = field(default=None, metadata={"min": 1})
    """number of cores per node, for all its ranks; null: the whole node (--exclusive), because
    SLURM otherwise gives a task only one core
    """
    extra_args: list[str] = field(default_factory=list)
    """further options of sbatch: ["--qos=high","--constraint=h100"]"""
    prologue: list[str] = field(default_factory=list)
    """lines of the job script that run before training starts: ["module load cuda"]"""

    @property
    def limit_s(self) -> int | None:
        """Time limit in seconds; None for the default of the cluster, and for no limit."""
        match = _TIME_LIMIT.fullmatch(self.time or "")
        if match is None:
            return None
        days, *parts = [int(part or 0) for part in match.groups()]
        first, second, third = parts
        if match[1] is None and match[4] is None:  # minutes, or minutes:seconds
            first, second, third = 0, first, second
        return (((days * 24 + first) * 60 + second) * 60 + third) or None

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid value."""
        limit = self.limit_s
        if self.grace_s == "auto" or limit is None or self.grace_s < limit:
            return []
        message = f"must be less than launch.slurm.time={self.time}, which is {limit} s"
        return [("grace_s", f"{message}; the job would be requeued before its first step")]


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """Objects of launch=kubernetes; launch.nnodes and launch.nproc set pods and ranks per pod."""

    kind: Literal["job", "jobset", "trainjob"] = "job"
    """kind of the object. job: an Indexed Job of any cluster, whose pods are replaced one by one;
    jobset: needs JobSet, all pods are replaced together; trainjob: needs Kubeflow Trainer, whose
    runtime decides about restarts
    """
    image: str | None = None
    """image of the containers, with axonlaunch installed; required"""
    context: str | None = None
    """context of the kubeconfig; null: the current one"""
    namespace: str | None = None
    """namespace of the objects; null: that of the context"""
    queue: str | None = None
    """LocalQueue of Kueue that admits the job; null: none"""
    priority_class: str | None = None
    """PriorityClass of the pods; null: the default of the cluster"""
    service_account: str | None = None
    """ServiceAccount of the pods; null: the default of the namespace"""
    node_selector: dict[str, str] = field(default_factory=dict)
    """labels that nodes must have: {"pool":"h100"}"""
    tolerations: list[str] = field(default_factory=list)
    """tolerated taints, as kubectl taint writes them: ["nvidia.com/gpu:NoSchedule"], or
    ["pool=train:NoExecute"]
    """
    volumes: list[str] = field(default_factory=list)
    """PersistentVolumeClaims and where they are mounted: ["runs:/runs","corpus:/data:ro"]. With
    run_dir=auto the run folder is on the first one that is writable
    """
    secrets: list[str] = field(default_factory=list)
    """Secrets whose entries become environment variables: ["hub-token","bucket-keys"]"""
    gpu: str = "nvidia.com/gpu"
    """resource of which a pod gets one per rank; not with launch.device=cpu or launch.backend=gloo
    """
    memory: str = "auto"
    """memory of a pod, such as 200Gi; auto: from the memory estimate"""
    cpus: int | Literal["auto"] = field(default="auto", metadata={"min": 1})
    """cores that a pod requests; auto: launch.threads per rank if that is a number, else 1, and 1
    for each data worker
    """
    grace_s: int | Literal["auto"] = field(default="auto", metadata={"min": 1})
    """seconds that a pod has to save a checkpoint before it is killed; auto: from the size of the
    checkpoint
    """
    runtime: str = "torch-distributed"
    """ClusterTrainingRuntime of kind=trainjob"""
    patch: str | None = None
    """YAML file that is merged into the object: mappings by key, lists of named entries by name,
    other lists are replaced, null removes a key
    """


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Cluster of launch=ray; launch.nnodes and launch.nproc set nodes and ranks per node."""

    address: str = "auto"
    """address of the cluster: ray://HOST:10001, or HOST:6379 from one of its nodes; auto: the
    environment variable RAY_ADDRESS, else the cluster of this node
    """
    cpus: int | Literal["auto"] = field(default="auto", metadata={"min": 1})
    """cores of a node that the run reserves, shared by its ranks; auto: launch.threads per rank if
    that is a number, else 1, and 1 for each data worker
    """
    resources: dict[str, float] = field(default_factory=dict)
    """further resources that each node must have: {"infiniband":1}"""
    runtime_env: str | None = None
    """YAML file with Ray's runtime_env of the processes (working_dir, env_vars, pip); null: that of
    the Ray job
    """
    autoscaling: bool = False
    """wait for nodes that an autoscaler adds; otherwise a cluster that is too small is an error"""


@dataclass(frozen=True, kw_only=True)
class SkyPilotConfig:
    """Task of launch=skypilot, which is printed by --render."""

    gpu: str | None = None
    """accelerator, such as H100, of which a node has launch.nproc; null: none"""
    image: str | None = None
    """container image with axonlaunch and the code of the run"""
    infra: str | None = None
    """where to run, such as aws/us-east-1 or k8s; null: the cheapest"""


@dataclass(frozen=True, kw_only=True)
class DstackConfig:
    """Task of launch=dstack, which is printed by --render."""

    gpu: str | None = None
    """accelerator, such as H100, of which a node has launch.nproc; null: none"""
    image: str | None = None
    """container image with axonlaunch and the code of the run"""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Start and rendezvous of ranks."""

    name: str = field(
        default="auto",
        metadata={
            "allowed": "auto | local | env | slurm | kubernetes | ray | skypilot | dstack, or the "
            "name of a registered launcher"
        },
    )
    """launcher. auto: detected from the environment (a rank of torchrun, mpirun or srun, or one of
    several nodes by WORLD_SIZE), else local; local: ranks on this node, the environment is ignored;
    env: from the environment, an error if it describes no world; slurm, kubernetes: submit a job;
    ray: nodes of a Ray cluster; skypilot, dstack: only --render, which prints their YAML
    """
    nproc: int | Literal["auto"] = field(default="auto", metadata={"min": 1})
    """number of ranks per node; auto: one per accelerator; without accelerators 2, or the number
    that the degrees of the strategy need
    """
    nnodes: int | str = field(default=1, metadata={"min": 1})
    """number of nodes, each with nproc ranks; 2:4: between 2 and 4, depending on how many join"""
    node_rank: int | Literal["auto"] = field(default="auto", metadata={"min": 0})
    """rank of this node, from 0; auto: from the environment"""
    master_addr: str = "auto"
    """address of node 0, as the other nodes reach it; auto: from the environment"""
    master_port: int | Literal["auto"] = field(default="auto", metadata={"min": 1, "max": 65535})
    """port of the rendezvous, on node 0; auto: from the environment, else a free one"""
    token_file: str | None = None
    """file with a secret, equal on all nodes and readable only by this user (mode 0600); nodes sign
    their messages with a key derived from it. Create it by (umask 077; head -c 32 /dev/urandom |
    base64 > FILE)
    """
    require_token: bool = False
    """refuse runs on several nodes without token_file, because messages could be forged"""
    backend: Literal["auto", "gloo", "nccl", "mock"] = "auto"
    """communication backend. auto: nccl if each rank has an accelerator, else gloo, or mock with
    device=cuda; mock: all ranks are threads of one process
    """
    device: Literal["auto", "cpu", "cuda"] = field(
        default="auto", metadata={"refused": {"gpu": "did you mean cuda? use auto, cpu or cuda"}}
    )
    """device of the ranks. auto: accelerators with nccl, else the CPU; cpu: the CPU, even if there
    are accelerators; cuda: accelerators, shared if there are fewer than ranks (with
    launch.backend=mock any layout, to debug it on one device; with gloo only single and ddp)
    """
    timeout_s: float = field(default=600.0, metadata={"above": 0})
    """seconds that nodes wait for each other to join, and seconds without progress of a rank after
    which the run fails and reports the position of each rank
    """
    max_restarts: int = field(default=0, metadata={"min": 0})
    """largest number of restarts of a failed run, from its last checkpoint on the remaining nodes
    """
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    skypilot: SkyPilotConfig = field(default_factory=SkyPilotConfig)
    dstack: DstackConfig = field(default_factory=DstackConfig)
    threads: int | Literal["auto"] = field(default="auto", metadata={"min": 1})
    """number of CPU threads per rank; auto: the environment variable OMP_NUM_THREADS of the first
    node, else its cores / its ranks, on all nodes; it affects the rounding of sums, so that losses
    differ in their last bits
    """
    pin_cores: bool = True
    """pin each rank to a separate set of physical cores near its device"""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Functions that check and launch runs; each is a callable or ``"module:function"``.

    Attributes:
        check: Function of a configuration and ``LaunchOptions`` that returns the checked, completed
            configuration, or raises ``ConfigError``. Called for all runs of a command before the
            first ``launch``.
        launch: Function of the checked configuration and ``LaunchOptions`` that returns the exit
            status and the summary of the run; the summary is None if another process has it.
        on_this_node: Whether ``launch`` runs all ranks on this node and waits for them. If so,
            finished runs are skipped, and the runs of a sweep are compared.
        sweeps: Whether the launcher supports several runs in one command.
        renders: Whether ``launch`` can print the job instead of submitting it.
        renders_sweeps: Whether the printed jobs of several runs can be submitted as one text.
    """

    check: str | Callable[..., Any]
    launch: str | Callable[..., Any]
    on_this_node: bool = False
    sweeps: bool = True
    renders: bool = False
    renders_sweeps: bool = False


LAUNCHERS: Registry[Any, Launcher] = Registry(
    "launcher",
    {
        "auto": Entry(None, "detected from the environment, else local", LaunchConfig),
        "local": Entry(
            None,
            "ranks on this node",
            LaunchConfig,
            Launcher(
                check="axonlaunch.launch.local.launcher:check",
                launch="axonlaunch.launch.local.launcher:launch",
                on_this_node=True,
            ),
        ),
        "env": Entry(None, "world described by the environment", LaunchConfig),
        "slurm": Entry(
            None,
            "a SLURM job",
            LaunchConfig,
            Launcher(
                check="axonlaunch.launch.external.slurm.launcher:check",
                launch="axonlaunch.launch.external.slurm.launcher:launch",
                renders=True,
            ),
        ),
        "kubernetes": Entry(
            None,
            "a Job, JobSet or TrainJob of Kubernetes",
            LaunchConfig,
            Launcher(
                check="axonlaunch.launch.external.kubernetes.launcher:check",
                launch="axonlaunch.launch.external.kubernetes.launcher:launch",
                renders=True,
                renders_sweeps=True,
            ),
        ),
        "ray": Entry(
            None,
            "nodes of a Ray cluster",
            LaunchConfig,
            Launcher(
                check="axonlaunch.launch.external.ray.launcher:check",
                launch="axonlaunch.launch.external.ray.launcher:launch",
            ),
        ),
        "skypilot": Entry(
            None,
            "a task of SkyPilot (--render)",
            LaunchConfig,
            Launcher(
                check="axonlaunch.launch.external.cloud_tasks:check",
                launch="axonlaunch.launch.external.cloud_tasks:launch",
                renders=True,
            ),
        ),
        "dstack": Entry(
            None,
            "a task of dstack (--render)",
            LaunchConfig,
            Launcher(
                check="axonlaunch.launch.external.cloud_tasks:check",
                launch="axonlaunch.launch.external.cloud_tasks:launch",
                renders=True,
            ),
        ),
    },
    entry_points="axonlaunch.launchers",
    free_config=LaunchConfig,
)
"""Launchers by name; ``auto`` and ``env`` are resolved to another one from the environment."""
