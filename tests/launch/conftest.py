"""Fixtures that run the real command in real processes, in a temporary folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.command import FAULTS, Command, Served
from support.launchers import NodeNamespaces, kubernetes, node_namespaces
from support.served import Server

from axonlaunch.launch.external.kubernetes.cluster import Cluster


@pytest.fixture
def axonlaunch(tmp_path: Path) -> Iterator[Command]:
    """Return the command in a new folder. Kill processes that it leaves running, and fail the
    test.
    """
    command = Command(tmp_path)
    yield command
    # Python's resource tracker ends a moment after the command.
    with suppress(AssertionError):
        command.wait_until_gone(seconds=5)
    left = command.processes()
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left, "a run left processes behind"


@pytest.fixture
def served(axonlaunch: Command, server: Server) -> Served:
    """Return the command forked from a server that tests share, for tests of a started run."""
    return Served(axonlaunch.folder, server)


@pytest.fixture
def two(axonlaunch: Command) -> Iterator[NodeNamespaces]:
    """Return two nodes on which each command is a new interpreter."""
    with node_namespaces(axonlaunch.folder, 2) as nodes:
        yield nodes


@pytest.fixture
def two_served(axonlaunch: Command, server: Server) -> Iterator[NodeNamespaces]:
    """Return two nodes on which the command is forked from a server that tests share."""
    with node_namespaces(axonlaunch.folder, 2, server) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of a Kubernetes cluster whose pods are processes of this machine."""
    with kubernetes(tmp_path_factory.mktemp("kube")) as folder:
        yield folder


@pytest.fixture
def api(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Return the API server of the cluster."""
    monkeypatch.setenv("KUBECONFIG", str(cluster / "kubeconfig"))
    return Cluster()


@pytest.fixture
def faulty(tmp_path: Path) -> list[str]:
    """Return overrides that train a model which fails as ``model.arguments`` describe."""
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
