"""Detects from environment variables which launcher or cluster started this process.

Incomplete or invalid variables are reported as problems; valid values are written into a composed
configuration. This module neither imports torch nor starts processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from axonlaunch.config import Composed, ConfigError, ConfigIssue
from axonlaunch.config.consistency.layout import is_on_cpu
from axonlaunch.config.options.launch import LaunchConfig
from axonlaunch.config.problems.errors import divisor_of
from axonlaunch.launch.environment.environment_variables import (
    ADDRESS,
    COMPLETION_INDEX,
    NODE_VARIABLES,
    OPEN_MPI,
    PMI,
    RANK_VARIABLES,
    SLURM,
    NodeVariables,
    RankVariables,
)
from axonlaunch.launch.environment.variable_reader import (
    VariableReader,
    first_host,
    port_of,
    slurm_address,
    tasks_here,
)


@dataclass(frozen=True, kw_only=True)
class ClusterEnvironment:
    """A launcher's description of this process; the defaults mean that no launcher started it.

    Attributes:
        launcher: Name of the launcher, for messages; empty if no launcher started this process.
        rank: Global rank of this process, or of the first rank that it starts.
        world_size: Number of ranks of the run.
        local_rank: Rank of this process on its node; None if this process starts the node's ranks.
        local_world_size: Number of ranks on this node; None if unknown.
        nnodes: Number of nodes; None if unknown.
        node_rank: Number of this node; None if unknown.
        nproc: Number of ranks that this process has to start; None if the launcher leaves it open.
        gpus: Number of GPUs of this node, each of which has a rank unless the run computes on the
            CPU; None if unknown.
        completion_index: Number of this pod of an Indexed Job; None outside of one. It is the
            number of the node if the run has several.
        master_addr: Address of rank 0; None if unknown.
        master_port: Port on which rank 0 listens; None if unknown.
        run_id: Distinguishes this run from others of the same launcher.
        agent_hosts_store: Whether the launcher listens at that port instead of rank 0.
        devices: Number of ranks on each node that can have a separate device. It is set after all
            ranks have reported the devices that they see.
        problems: Errors of an incomplete or invalid description.
    """

    launcher: str = ""
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    nproc: int | None = None
    gpus: int | None = None
    completion_index: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    run_id: str = ""
    agent_hosts_store: bool = False
    devices: int = 0
    problems: tuple[ConfigIssue, ...] = ()

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> ClusterEnvironment:
        """Read the environment variables of this process.

        If a scheduler started only one task, it counts as no launcher: this process then starts
        the ranks.
        """
        reader = VariableReader(environment)
        try:
            detected = _read(reader)
        except ConfigError as error:
            return cls(problems=(*reader.problems, *error.problems))
        return cls(problems=tuple(reader.problems)) if reader.problems else detected

    @property
    def one_per_node(self) -> bool:
        """Whether a scheduler started one process on each of several nodes."""
        return self.local_world_size == 1 and (self.nnodes or 1) > 1

    def is_rank(self, compose: Callable[[], Composed], *, accelerators: Callable[[], int]) -> bool:
        """Return whether this process is one rank, instead of the launcher of its node's ranks.

        Args:
            compose: Composes the configuration. It is called only if ``launch.nproc`` decides.
            accelerators: Counts this node's accelerators. It is called only if their number
                decides.
        """
        if self.local_rank is None:
            return False
        if not self.one_per_node:
            return True
        nproc = compose().tree.get("launch", {}).get("nproc", "auto")
        count = accelerators() if nproc == "auto" else nproc
        return not (isinstance(count, int) and count > 1)

    def for_node(self) -> ClusterEnvironment:
        """Return the environment of a process that starts its node's ranks itself."""
        return dataclasses.replace(self, local_rank=None) if self.one_per_node else self

    def applied_to(self, composed: Composed, *, accelerators: Callable[[], int]) -> Composed:
        """Return a composed configuration with the environment's ``launch`` values and problems.

        Args:
            composed: Composed configuration of the run.
            accelerators: Counts this node's accelerators. It is called only if the number of ranks
                on this node is not set elsewhere.
        """
        tree: dict[str, Any] = {**composed.tree, "launch": {**composed.tree.get("launch", {})}}
        name, problems = tree["launch"].get("name", "auto"), list(self.problems)
        if self.local_rank is not None and name == "local":
            message = f"each of the processes of {self.launcher} would start a run; use auto"
            problems = [ConfigIssue("launch.name", message, name)]
        elif name == "local":
            problems = []
        elif self.completion_index is not None and not self.launcher:
            if tree["launch"].get("nnodes", 1) != 1:  # otherwise each pod is a run
                rank = {"node_rank": self.completion_index}
                problems += _write(tree["launch"], rank, self, COMPLETION_INDEX)
        elif self.launcher:
            problems += apply_to_config(tree, self, accelerators=accelerators)
        elif name == "env" and not problems and tree["launch"].get("nnodes", 1) == 1:
            message = (
                "the environment names no world; set WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT"
            )
            problems.append(ConfigIssue("launch.name", message, name))
        previous = composed.tree.get("launch", {})
        source = self.launcher or COMPLETION_INDEX
        origin = f"environment ({source})".replace(" (the environment)", "")
        changed = {f"launch.{k}": origin for k, v in tree["launch"].items() if previous.get(k) != v}
        return dataclasses.replace(
            composed, tree=tree, problems=[*composed.problems, *problems], in_environment=changed
        )


def _read(reader: VariableReader) -> ClusterEnvironment:
    environment = reader.environment
    if any(environment.get(name) for name in RANK_VARIABLES):
        return _variables(reader)
    if environment.get(OPEN_MPI.rank):
        return _scheduler(reader, OPEN_MPI)
    if environment.get(SLURM.rank) and environment.get("SLURM_STEP_ID"):
        # A batch script also has SLURM_PROCID=0, but is not a job step.
        return _scheduler(reader, SLURM)
    if environment.get(PMI.rank):
        return _scheduler(reader, PMI)
    sets = [names for names in NODE_VARIABLES if _is_set(names, environment)]
    if sets:
        return _one_of_nodes(reader, sets)
    index = reader.number(COMPLETION_INDEX)
    if index is not None:
        return ClusterEnvironment(
            completion_index=index,
            master_addr=environment.get("MASTER_ADDR"),
            master_port=reader.number("MASTER_PORT", least=1, below=65536),
        )
    if any(environment.get(name) for name in ADDRESS):
        return _variables(reader)
    return ClusterEnvironment()


def _is_set(names: NodeVariables, environment: Mapping[str, str]) -> bool:
    return any(
        environment.get(name)
        for name in (names.nnodes, names.node_rank, names.address, names.port, names.nproc)
    )


def _one_of_nodes(reader: VariableReader, sets: list[NodeVariables]) -> ClusterEnvironment:
    """Read the variables of tools that start one process on each node, which starts its ranks.

    The first tool's values count; those of the others, and the index of the pod, must be equal.
    """
    found = [_node(reader, names) for names in sets]
    first, names = found[0], sets[0]
    for other, other_names in zip(found[1:], sets[1:], strict=True):
        _refuse_other(reader, (names.nnodes, first.nnodes), (other_names.nnodes, other.nnodes))
        rank = (names.node_rank, first.node_rank)
        _refuse_other(reader, rank, (other_names.node_rank, other.node_rank))
    index = (COMPLETION_INDEX, reader.number(COMPLETION_INDEX))
    _refuse_other(reader, (names.node_rank, first.node_rank), index)
    if first.nnodes != 1:
        return first
    if first.nproc is None:
        return ClusterEnvironment()
    return dataclasses.replace(
        first, world_size=first.nproc, local_world_size=None, master_addr=None, master_port=None
    )


def _refuse_other(
    reader: VariableReader, first: tuple[str, int | None], other: tuple[str, int | None]
) -> None:
    if first[1] is not None and other[1] is not None and first[1] != other[1]:
        message = f"but {first[0]}={first[1]}; they describe the same node: unset one of them"
        reader.problems.append(ConfigIssue(other[0], message, other[1]))


def _node(reader: VariableReader, names: NodeVariables) -> ClusterEnvironment:
    environment = reader.environment
    required = [name for name in (names.nnodes, names.node_rank, names.address, names.port) if name]
    reader.require(required, of=[*required, *([names.nproc] if names.nproc else [])])
    nnodes = reader.number(names.nnodes, least=1)
    node_rank = reader.number(names.node_rank, below=nnodes)
    addresses = environment.get(names.address, "").split()
    if nnodes is not None and 1 < len(addresses) != nnodes:
        message = f"has {len(addresses)} addresses, but {names.nnodes}={nnodes}"
        reader.problems.append(ConfigIssue(names.address, message))
    nproc = None
    if names.nproc and environment.get(names.nproc) not in ("auto", "gpu"):
        nproc = reader.number(names.nproc, least=1)
    port = reader.number(names.port or "MASTER_PORT", least=1, below=65536)
    run_id = environment.get(names.run_id, "")
    return ClusterEnvironment(
        launcher=names.launcher,
        rank=node_rank or 0,
        world_size=nnodes or 1,
        local_world_size=1,
        nnodes=nnodes,
        node_rank=node_rank,
        nproc=nproc,
        gpus=reader.number(names.gpus) or None,
        master_addr=addresses[0] if addresses else None,
        master_port=port or port_of(f"{names.launcher} {run_id}"),
        run_id=run_id,
    )


def apply_to_config(
    tree: dict[str, Any], detected: ClusterEnvironment, *, accelerators: Callable[[], int]
) -> list[ConfigIssue]:
    """Write the environment's ``launch`` values into a composed tree.

    Args:
        tree: Nested plain values; ``launch`` is changed in place.
        accelerators: Counts this node's accelerators. It is called only if the number of ranks on
            this node is not set elsewhere.

    Returns:
        Problems: settings that contradict the environment.
    """
    launch = tree.setdefault("launch", {})
    nproc, problems = _ranks_here(launch, detected, accelerators)
    if nproc is None:
        return problems
    if detected.one_per_node and detected.local_rank is None:
        world_size, first = nproc * (detected.nnodes or 1), nproc * (detected.node_rank or 0)
    else:
        world_size, first = detected.world_size, detected.rank
    if world_size % nproc:
        message = f"{nproc} ranks per node; use {divisor_of(world_size)}"
        message = f"WORLD_SIZE={world_size} ranks are not a multiple of {message}"
        return [ConfigIssue("launch.nproc", message, launch.get("nproc", "auto"))]
    if detected.local_rank is None and first % nproc:
        message = f"RANK={first} is not the first rank of a node with {nproc}"
        problems.append(ConfigIssue("launch.nproc", message, launch.get("nproc", "auto")))
    values = {
        "nproc": nproc,
        "nnodes": world_size // nproc,
        "node_rank": first // nproc,
    }
    return problems + _write(launch, values, detected, _source(detected))


def _write(
    launch: dict[str, Any], values: dict[str, Any], detected: ClusterEnvironment, source: str
) -> list[ConfigIssue]:
    """Write values and the address of node 0 into ``launch``; report settings that differ."""
    problems: list[ConfigIssue] = []
    values |= {"master_addr": detected.master_addr, "master_port": detected.master_port}
    for key, value in values.items():
        configured = launch.get(key, "auto")
        if value is None:
            continue
        if configured not in ("auto", value) and not (key == "nnodes" and configured == 1):
            message = (
                f"{detected.launcher or source} says {value}; remove this setting, or start "
                f"without {source}"
            )
            problems.append(ConfigIssue(f"launch.{key}", message, configured))
        launch[key] = value
    return problems


def _source(detected: ClusterEnvironment) -> str:
    return "these variables" if detected.launcher == "the environment" else detected.launcher


def _ranks_here(
    launch: dict[str, Any], detected: ClusterEnvironment, accelerators: Callable[[], int]
) -> tuple[int | None, list[ConfigIssue]]:
    nproc, nnodes = launch.get("nproc", "auto"), launch.get("nnodes", 1)
    if detected.nproc is not None:
        return detected.nproc, []
    device, backend = launch.get("device", "auto"), launch.get("backend", "auto")
    if detected.gpus and not is_on_cpu(LaunchConfig(device=device, backend=backend)):
        return detected.gpus, []
    if detected.local_world_size is not None and detected.local_rank is not None:
        return detected.local_world_size, []
    if isinstance(nproc, int) and not isinstance(nproc, bool) and nproc > 0:
        return nproc, []
    if detected.local_world_size is not None and not detected.one_per_node:
        return detected.local_world_size, []
    is_launcher_of_node = detected.one_per_node and detected.local_rank is None
    if is_launcher_of_node or nnodes == 1:
        if count := accelerators():
            return count, []
    elif isinstance(nnodes, int) and detected.world_size % nnodes == 0:
        return detected.world_size // nnodes, []
    if is_launcher_of_node:
        message = f"is required without accelerators; {detected.launcher} sets no number of ranks"
        return None, [ConfigIssue("launch.nproc", message, nproc)]
    message = (
        f"the run has WORLD_SIZE={detected.world_size} ranks, and nothing says how many of them "
        "run on this node; write the number, or launch.nnodes"
    )
    return None, [ConfigIssue("launch.nproc", message, nproc)]


def _variables(reader: VariableReader) -> ClusterEnvironment:
    environment = reader.environment
    reader.require(("RANK", "WORLD_SIZE", *ADDRESS), of=(*RANK_VARIABLES, *ADDRESS))
    world_size = reader.number("WORLD_SIZE", least=1)
    rank = reader.number("RANK", below=world_size)
    here = reader.number("LOCAL_WORLD_SIZE", least=1)
    if here is not None and world_size is not None and here > world_size:
        message = f"is more than WORLD_SIZE={world_size}"
        reader.problems.append(ConfigIssue("LOCAL_WORLD_SIZE", message, here))
    local_rank = reader.number("LOCAL_RANK", below=here or world_size)
    run = environment.get("TORCHELASTIC_RUN_ID")
    return ClusterEnvironment(
        launcher="the environment" if run is None else "torchrun",
        rank=rank or 0,
        world_size=world_size or 1,
        local_rank=local_rank,
        local_world_size=here,
        master_addr=environment.get("MASTER_ADDR"),
        master_port=reader.number("MASTER_PORT", least=1, below=65536),
        run_id="" if run is None else f"{run}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        agent_hosts_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _scheduler(reader: VariableReader, names: RankVariables) -> ClusterEnvironment:
    environment = reader.environment
    world_size = reader.number(names.world_size, least=1)
    if world_size is None:
        reader.problems.append(ConfigIssue(names.world_size, f"is not set, but {names.rank} is"))
    if world_size == 1:
        return ClusterEnvironment()
    rank = reader.number(names.rank, below=world_size)
    local_rank = reader.number(names.local_rank, below=world_size)
    if local_rank is None:
        reader.problems.append(ConfigIssue(names.local_rank, f"is not set, but {names.rank} is"))
    run_id = environment.get(names.run_id, "")
    address, here, nnodes = environment.get("MASTER_ADDR"), None, None
    if names is SLURM:
        run_id = f"{run_id}.{environment.get('SLURM_STEP_ID', '')}"
        nnodes = reader.number(names.nnodes, least=1)
        here = tasks_here(environment)
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        address = address or (slurm_address(first_host(nodes)) if nnodes != 1 else "127.0.0.1")
    else:
        here = reader.number(names.local_world_size, least=1)
        if here is not None and here == world_size:
            address = address or "127.0.0.1"
    if not address:
        message = (
            "is not set, and mpirun does not say where rank 0 is; "
            "pass it, as in mpirun -x MASTER_ADDR=10.0.0.1"
        )
        reader.problems.append(ConfigIssue("MASTER_ADDR", message))
    port = reader.number("MASTER_PORT", least=1, below=65536)
    return ClusterEnvironment(
        launcher=names.launcher,
        rank=rank or 0,
        world_size=world_size or 1,
        local_rank=local_rank,
        local_world_size=here,
        nnodes=nnodes,
        node_rank=reader.number(names.node_rank) if names.node_rank else None,
        master_addr=address,
        master_port=port or port_of(f"{names.launcher} {run_id}"),
        run_id=run_id,
    )
