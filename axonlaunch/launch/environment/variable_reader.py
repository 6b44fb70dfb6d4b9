"""Reads numbers and node lists from environment variables, and collects problems with them."""

from __future__ import annotations

import re
import socket
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress

from axonlaunch.config import ConfigError, ConfigIssue


class VariableReader:
    """Reads variables of one environment and collects their problems.

    Attributes:
        environment: Environment variables.
        problems: Problems that were found.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.problems: list[ConfigIssue] = []

    def number(self, name: str, *, least: int = 0, below: int | None = None) -> int | None:
        """Return the number in a variable; None if it is not set or invalid."""
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

    def require(self, names: Sequence[str], *, of: Sequence[str]) -> None:
        """Report a problem for each unset variable of a set that must be complete.

        Args:
            names: Required variables.
            of: All variables of the set, which the message names if they are set.
        """
        set_names = [name for name in of if self.environment.get(name)]
        for name in names:
            if not self.environment.get(name):
                verb = "is" if len(set_names) == 1 else "are"
                message = f"is not set, but {', '.join(set_names)} {verb}"
                self.problems.append(ConfigIssue(name, f"{message}; set it, or write launch=local"))


def tasks_here(environment: Mapping[str, str]) -> int | None:
    """Return this node's number of tasks from ``SLURM_STEP_TASKS_PER_NODE``, like ``2(x3),1``."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(match[1])] * int(match[2] or 1)
    node = environment.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: ``gpu[03-07,9],login`` -> ``gpu03``."""
    match = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    assert match is not None
    return match[1] + (match[2] or "") + (match[3] or "")


def slurm_address(node: str) -> str:
    """Return a node's address: its name if that resolves as a host name, else SLURM's NodeAddr.

    Raises:
        ConfigError: The name is not a host name and SLURM does not report an address.
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
    """Derive a port from a run's identifier, below the range of ephemeral ports."""
    return 10000 + zlib.crc32(run_id.encode()) % 20000
