"""An attacker without the token reaches a run's ports while it starts and trains.

Runs in a separate network namespace, so that no other run of the node is disturbed. Without
namespaces, these cases are skipped.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab import (
    CANARY,
    COMMON,
    STRATEGIES,
    Ended,
    Lab,
    Log,
    check_complete,
    check_nothing_is_left,
    check_nothing_was_executed,
    complete,
    end,
    plain,
)
from support import stranger
from support.launchers import NodeNamespaces, node_namespaces

STRATEGY = "fsdp"
# Time limit for a node whose messages are overwritten, during which it is named.
OVERRIDES = [*COMMON, *STRATEGIES[STRATEGY], "launch.timeout_s=60"]
KINDS = [(deed, nodes) for deed in ("noise", "rob", "deface") for nodes in (1, 2)]
"""The attack x the number of nodes of the run."""


def run(lab: Lab, seed: int, log: Log) -> None:
    """Start a run next to an attacker."""
    deed, nodes = KINDS[seed % len(KINDS)]
    folder = lab.new(f"neighbor-{seed}")
    with node_namespaces(folder, nodes) as made:
        address = "127.0.0.1" if nodes == 1 else made.addresses[0]
        amount = {"noise": 10_000, "rob": 25, "deface": 25}[deed]
        log(f"{deed} beside a run on {nodes} node(s)", fault=True)
        with _stranger(made, deed, address, amount, folder / CANARY):
            results = _train(made, nodes)
        for result in results:
            _judge(result)
        command = plain(folder)
        check_nothing_is_left(command)
        check_nothing_was_executed(folder)
    expected = lab.losses(STRATEGY)
    if all(result.status == 0 for result in results):
        check_complete(command, expected)
    else:
        log("it ended and said why")
        complete(lab.quick(folder), OVERRIDES, expected)


def _train(made: NodeNamespaces, nodes: int) -> list[Ended]:
    if nodes == 1:
        return [end(made.command(0).start("train", *OVERRIDES))]
    overrides = [word for word in OVERRIDES if not word.startswith("launch.nproc")]
    return [end(process) for process in made.start(*overrides, nproc=1)]


def _judge(result: Ended) -> None:
    assert result.status in (0, 1, 2, 75), f"exit status {result.status}: {result.text[-1500:]}"


@contextmanager
def _stranger(
    made: NodeNamespaces, deed: str, address: str, amount: int, canary: Path
) -> Iterator[None]:
    program = [sys.executable, stranger.__file__, deed, address, str(amount), str(canary)]
    process = subprocess.Popen(
        ["ip", "netns", "exec", made.names[0], *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()  # it is ready
        yield
    finally:
        process.kill()
        process.communicate()
