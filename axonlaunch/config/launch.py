"""Typed configuration of how ranks are started, and the table of launchers.

It holds values and names; ``axonlaunch.launch`` carries them out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from axonlaunch.config.registry import Entry, Registry


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """What sbatch needs to know of a job (launch=slurm); nodes and ranks are those of the run."""

    partition: str | None = None
    """partition of the job; null: the cluster's default"""
    account: str | None = None
    """account that the job is charged to; null: the user's default"""
    time: str | None = None
    """time limit, as sbatch takes it: 30 (minutes), 8:00:00, 2-0; the run is checkpointed and
    requeued 2 minutes before it
    """
    cpus_per_task: int | None = field(default=None, metadata={"min": 1})
    """cores for all ranks of a node together; null: the whole node (--exclusive), for SLURM gives a
    task one core otherwise
    """
    extra_args: list[str] = field(default_factory=list)
    """more options of sbatch: ["--qos=high","--constraint=h100"]"""
    prologue: list[str] = field(default_factory=list)
    """lines of the job's script that run before training starts: ["module load cuda"]"""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How the ranks are started and find each other."""

    name: str = field(
        default="auto",
        metadata={"allowed": "auto | local | env | slurm, or the name of a registered launcher"},
    )
    """auto: detected from the environment: a rank of torchrun, mpirun or srun, one of several nodes
    (WORLD_SIZE), else local; local: ranks on this node, whatever the environment says; env: from
    the environment, and an error if it describes no world; slurm: submit a job
    """
    nproc: int | Literal["auto"] = field(default="auto", metadata={"min": 1})
    """ranks per node; auto: one per accelerator; without accelerators 2, or what the degrees of the
    strategy need
    """
    nnodes: int | str = field(default=1, metadata={"min": 1})
    """nodes, with nproc ranks on each; 2:4: from 2 to 4, as many as join and stay"""
    node_rank: int | Literal["auto"] = field(default="auto", metadata={"min": 0})
    """rank of this node, from 0; auto: from the environment"""
    master_addr: str = "auto"
    """address of node 0, as the other nodes reach it; auto: from the environment"""
    master_port: int | Literal["auto"] = field(default="auto", metadata={"min": 1, "max": 65535})
    """port of the rendezvous, on node 0; auto: from the environment, else a free one"""
    token_file: str | None = None
    """file with a secret, the same on every node, that only this user can read (mode 0600): the
    nodes sign their messages to each other with a key derived from it; made by
    (umask 077; head -c 32 /dev/urandom | base64 > FILE)
    """
    require_token: bool = False
    """refuse a run on more than one node without token_file; its messages could be forged"""
    backend: Literal["auto", "gloo", "nccl", "mock"] = "auto"
    """auto: nccl with an accelerator for each rank, else gloo, or mock with device=cuda; mock: all
    ranks are threads of one process
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where ranks compute. auto: on accelerators with nccl, else on the CPU; cpu: on the CPU,
    whatever else this node has; cuda: on accelerators, which ranks share where they are fewer: any
    layout under launch.backend=mock, to debug it on one, single and ddp under gloo
    """
    timeout_s: float = field(default=600.0, metadata={"above": 0})
    """seconds that nodes wait for each other to join, and that a rank may make no progress,
    after which the run fails and says where each rank is
    """
    max_restarts: int = field(default=0, metadata={"min": 0})
    """how often a run that fails is started again, from its last checkpoint, on the nodes that
    are left
    """
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    threads: int | Literal["auto"] = field(default="auto", metadata={"min": 1})
    """threads that a rank computes with on a CPU; auto: the first node's cores / its ranks, for all
    nodes; on another number sums round otherwise, and a run's losses differ in their last bits
    """
    pin_cores: bool = True
    """pin each rank to its own share of this node's physical cores, near its device"""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """What makes runs of configurations; its functions may be named, ``"module:function"``.

    Attributes:
        check: Takes a configuration and ``LaunchOptions``; returns the configuration, checked and
            complete, or raises ``ConfigError``. Called for all runs of a command before ``launch``
            is for the first.
        launch: Takes what ``check`` returned and ``LaunchOptions``; returns the exit status and
            the run's summary, None where another process has it.
        on_this_node: Whether ``launch`` runs all ranks here, to their end: runs that are finished
            are then passed over, and those of a sweep compared.
        sweeps: Whether it can launch more than one run of a command.
        renders: Whether ``launch`` can print what it would submit, and submit nothing.
    """

    check: str | Callable[..., Any]
    launch: str | Callable[..., Any]
    on_this_node: bool = False
    sweeps: bool = True
    renders: bool = False


LAUNCHERS: Registry[Any, Launcher] = Registry(
    "launcher",
    {
        "auto": Entry(None, "local, or what started this process", LaunchConfig),
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
        "env": Entry(None, "as the environment says", LaunchConfig),
        "slurm": Entry(
            None,
            "a SLURM job",
            LaunchConfig,
            Launcher(
                check="axonlaunch.launch.external.slurm:check",
                launch="axonlaunch.launch.external.slurm:launch",
                renders=True,
            ),
        ),
    },
    entry_points="axonlaunch.launchers",
    free_config=LaunchConfig,
)
"""``auto`` and ``env`` become one of the others once the environment is known."""
