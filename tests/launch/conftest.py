"""The real command in real processes, in a folder of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import FAULTS, Command, Served
from launchers import NodeNamespaces, node_namespaces
from served import Server


@pytest.fixture
def axonlaunch(tmp_path: Path) -> Iterator[Command]:
    """The command in a new folder; whatever it leaves running is killed, and is a failure."""
    command = Command(tmp_path)
    yield command
    left = command.processes()
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left, "a run left processes behind"


@pytest.fixture
def served(axonlaunch: Command, server: Server) -> Served:
    """The same from a server that tests share: for what a run does, once it started."""
    return Served(axonlaunch.folder, server)


@pytest.fixture
def two(axonlaunch: Command) -> Iterator[NodeNamespaces]:
    """Two nodes on which the command is a new interpreter."""
    with node_namespaces(axonlaunch.folder, 2) as made:
        yield made


@pytest.fixture
def two_served(axonlaunch: Command, server: Server) -> Iterator[NodeNamespaces]:
    """Two nodes on which the command is forked from a server that tests share."""
    with node_namespaces(axonlaunch.folder, 2, server) as made:
        yield made


@pytest.fixture
def faulty(tmp_path: Path) -> list[str]:
    """Overrides that train a model which fails as ``model.arguments`` says."""
    (tmp_path / "faulty_plugin.py").write_text(FAULTS)
    return [
        "plugins=[faulty_plugin]",
        "model=faulty",
        "data=synthetic_tokens",
        "data.sequence_length=16",
        "train.global_batch_size=8",
        "train.steps=6",
        "train.log_every=1",
        "train.eval_batches=0",
        "launch.nproc=2",
    ]
