"""What started this process, read from its environment: torchrun, MPI, SLURM, or a person.

It reads the variables that launchers set, reports a world that they describe only by half, and
writes the rest into a composed configuration. Nothing here is torch's or starts anything.
"""

from __future__ import annotations

import dataclasses
import re
import socket
import subprocess
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from axonlaunch.config import Composed, ConfigError, ConfigIssue
from axonlaunch.config.errors import divisor_of
from axonlaunch.launch.environment_variables import (
    ADDRESS,
    OPEN_MPI,
    OWN,
    PMI,
    SLURM,
    RankVariables,
)


@dataclass(frozen=True, kw_only=True)
class ClusterEnvironment:
    """What a launcher said of this process; the defaults mean that none started it.

    Attributes:
        launcher: Its name, for messages; empty where none started this process.
        rank: This process's; where it is to start ranks itself, the first of theirs.
        world_size: Ranks of the run.
        local_rank: Among the ranks of this node; None where this process is to start them.
        local_world_size: Ranks on this node; None where nobody said.
        nnodes: Nodes; None where nobody said.
        node_rank: Which of them this is; None where nobody said.
        master_addr: Where rank 0 is; None where nobody said.
        master_port: Where it listens; None where nobody said.
        run_id: What distinguishes this run from others of the same launcher.
        agent_hosts_store: The launcher itself listens there, not rank 0.
        devices: How many ranks of each node can have a device of their own, once all have said
            what they see.
        problems: What is wrong with it, where it describes a world by half or an invalid one.
    """

    launcher: str = ""
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    run_id: str = ""
    agent_hosts_store: bool = False
    devices: int = 0
    problems: tuple[ConfigIssue, ...] = ()

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> ClusterEnvironment:
        """Return what the environment says of this process.

        A scheduler's only task is no world: the ranks are then started here.
        """
        reader = _Reader(environment)
        try:
            detected = _read(reader)
        except ConfigError as error:
            return cls(problems=(*reader.problems, *error.problems))
        return cls(problems=tuple(reader.problems)) if reader.problems else detected

    @property
    def one_per_node(self) -> bool:
        """Whether a scheduler placed one process on each of several nodes."""
        return self.local_world_size == 1 and (self.nnodes or 1) > 1

    def is_rank(self, compose: Callable[[], Composed], *, accelerators: Callable[[], int]) -> bool:
        """Whether this process is itself one rank, and does not start the ranks of its node.

        Args:
            compose: Composes the configuration, where its ranks per node decide.
            accelerators: Counts this node's, where they do.
        """
        if self.local_rank is None:
            return False
        if not self.one_per_node:
            return True
        nproc = compose().tree.get("launch", {}).get("nproc", "auto")
        count = accelerators() if nproc == "auto" else nproc
        return not (isinstance(count, int) and count > 1)

    def of_node(self) -> ClusterEnvironment:
        """Return the same for a process that starts its node's ranks itself."""
        return dataclasses.replace(self, local_rank=None) if self.one_per_node else self

    def applied_to(self, composed: Composed, *, accelerators: Callable[[], int]) -> Composed:
        """Return a composed configuration with what is said of ``launch``, and what contradicts it.

        Args:
            composed: The run's.
            accelerators: Counts this node's, where nothing else says how many ranks it is to have.
        """
        tree: dict[str, Any] = {**composed.tree, "launch": {**composed.tree.get("launch", {})}}
        name, problems = tree["launch"].get("name", "auto"), list(self.problems)
        if self.local_rank is not None and name == "local":
            message = f"each of the processes of {self.launcher} would start a run; use auto"
            problems = [ConfigIssue("launch.name", message, name)]
        elif name == "local":
            problems = []
        elif self.launcher:
            problems += apply_to_config(tree, self, accelerators=accelerators)
        elif name == "env" and not problems and tree["launch"].get("nnodes", 1) == 1:
            message = (
                "the environment names no world; set WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT"
            )
            problems.append(ConfigIssue("launch.name", message, name))
        before = composed.tree.get("launch", {})
        origin = f"environment ({self.launcher})".replace(" (the environment)", "")
        said = {f"launch.{k}": origin for k, v in tree["launch"].items() if before.get(k) != v}
        return dataclasses.replace(
            composed, tree=tree, problems=[*composed.problems, *problems], in_environment=said
        )


def _read(reader: _Reader) -> ClusterEnvironment:
    environment = reader.environment
    if any(environment.get(name) for name in OWN):
        return _variables(reader)
    if environment.get(OPEN_MPI.rank):
        return _scheduler(reader, OPEN_MPI)
    if environment.get(SLURM.rank) and environment.get("SLURM_STEP_ID"):
        # A batch script has SLURM_PROCID=0 too, but is no step.
        return _scheduler(reader, SLURM)
    if environment.get(PMI.rank):
        return _scheduler(reader, PMI)
    if any(environment.get(name) for name in ADDRESS):
        return _variables(reader)
    return ClusterEnvironment()


def apply_to_config(
    tree: dict[str, Any], detected: ClusterEnvironment, *, accelerators: Callable[[], int]
) -> list[ConfigIssue]:
    """Write into a composed tree what the environment says of ``launch``.

    Args:
        tree: Nested plain values; ``launch`` is changed.
        detected: What they say.
        accelerators: Counts this node's, where nothing else says how many ranks it is to have.

    Returns:
        What contradicts them.
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
        seen = f"WORLD_SIZE={world_size} ranks are not a multiple of "
        return [ConfigIssue("launch.nproc", seen + message, launch.get("nproc", "auto"))]
    if detected.local_rank is None and first % nproc:
        message = f"RANK={first} is not the first rank of a node with {nproc}"
        problems.append(ConfigIssue("launch.nproc", message, launch.get("nproc", "auto")))
    said = {
        "nproc": nproc,
        "nnodes": world_size // nproc,
        "node_rank": first // nproc,
        "master_addr": detected.master_addr,
        "master_port": detected.master_port,
    }
    for key, value in said.items():
        asked = launch.get(key, "auto")
        if value is None:
            continue
        if asked not in ("auto", value) and not (key == "nnodes" and asked == 1):
            message = (
                f"{detected.launcher} says {value}; remove this setting, or start without "
                f"{_source(detected)}"
            )
            problems.append(ConfigIssue(f"launch.{key}", message, asked))
        launch[key] = value
    return problems


def _source(detected: ClusterEnvironment) -> str:
    return "these variables" if detected.launcher == "the environment" else detected.launcher


def _ranks_here(
    launch: dict[str, Any], detected: ClusterEnvironment, accelerators: Callable[[], int]
) -> tuple[int | None, list[ConfigIssue]]:
    nproc, nnodes = launch.get("nproc", "auto"), launch.get("nnodes", 1)
    if detected.local_world_size is not None and detected.local_rank is not None:
        return detected.local_world_size, []
    if isinstance(nproc, int) and not isinstance(nproc, bool) and nproc > 0:
        return nproc, []
    if detected.local_world_size is not None and not detected.one_per_node:
        return detected.local_world_size, []
    if isinstance(nnodes, int) and nnodes > 1 and detected.world_size % nnodes == 0:
        return detected.world_size // nnodes, []
    if nnodes == 1 and (count := accelerators()):
        return count, []
    message = (
        f"the run has WORLD_SIZE={detected.world_size} ranks, and nothing says how many of them "
        "run on this node; write the number, or launch.nnodes"
    )
    return None, [ConfigIssue("launch.nproc", message, nproc)]


class _Reader:
    """Reads numbers from the environment and gathers what is wrong with them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.problems: list[ConfigIssue] = []

    def number(self, name: str, *, least: int = 0, below: int | None = None) -> int | None:
        """Return a variable's number; None where it is not set or invalid."""
        text = self.environment.get(name, "")
        if not text:
            return None
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            self.problems.append(ConfigIssue(name, f"expected a whole number from {least}", text))
            return None
        if below is not None and int(text) >= below:
            self.problems.append(ConfigIssue(name, f"expected a number below {below}", text))
            return None
        return int(text)

    def missing(self, *names: str) -> None:
        """Report the unset ones among variables that must be set together."""
        set_names = [name for name in (*OWN, *ADDRESS) if self.environment.get(name)]
        for name in names:
            if not self.environment.get(name):
                verb = "is" if len(set_names) == 1 else "are"
                message = f"is not set, but {', '.join(set_names)} {verb}"
                self.problems.append(ConfigIssue(name, f"{message}; set it, or write launch=local"))


def _variables(reader: _Reader) -> ClusterEnvironment:
    environment = reader.environment
    reader.missing("RANK", "WORLD_SIZE", *ADDRESS)
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


def _scheduler(reader: _Reader, names: RankVariables) -> ClusterEnvironment:
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
        here = _tasks_here(environment)
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        address = address or (_address(first_host(nodes)) if nnodes != 1 else "127.0.0.1")
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


def _tasks_here(environment: Mapping[str, str]) -> int | None:
    """Return the tasks of this node from ``SLURM_STEP_TASKS_PER_NODE``: ``2(x3),1``."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(match[1])] * int(match[2] or 1)
    node = environment.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def first_host(nodes: str) -> str:
    """Return the first of SLURM's node list: ``gpu[03-07,9],login`` -> ``gpu03``."""
    match = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    assert match is not None
    return match[1] + (match[2] or "") + (match[3] or "")


def _address(node: str) -> str:
    """Return where a node is reached: its name is a host's, unless its administrator chose not to.

    Raises:
        ConfigError: Neither the name is a host's, nor does SLURM report the address.
    """
    with suppress(OSError):
        socket.getaddrinfo(node, None)
        return node
    with suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "show", "node", node, "--oneliner"]
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
        if match := re.search(r"\bNodeAddr=(\S+)", answer):
            return match[1]
    message = f"srun's first node {node} is not a host name; set the variable to its address"
    raise ConfigError([ConfigIssue("MASTER_ADDR", message)])


def port_of(run_id: str) -> int:
    """Derive a port from what names a run, below the range of ephemeral ports."""
    return 10000 + zlib.crc32(run_id.encode()) % 20000
