"""Starts runs with torchrun, mpirun or srun, and simulates nodes as network namespaces."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support import served
from support.command import Command, wait_for
from support.served import Server

SUPPORT = Path(__file__).parent
SCRIPTS = SUPPORT.parents[1] / "scripts"
BIN = Path(sys.executable).parent
_NOT_BUILT = 3
"""Exit status of scripts/kube-up without its programs."""


def needs(*programs: str, root: bool = True) -> None:
    """Skip a test on a node without the needed programs, and name them."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # daemons are in sbin
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (scripts/system-packages)")
    if root and os.geteuid() != 0:
        pytest.skip("needs root")


def unused_port() -> int:
    """Return a port of this node that other tests at the same time hardly get.

    It is below the range that systems assign automatically.
    """
    while True:
        port = random.SystemRandom().randrange(12000, 30000)
        with socket.socket() as there, suppress(OSError):
            there.bind(("127.0.0.1", port))
            return port


def have_sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an ``sbatch`` that submits nothing on the PATH, as on a cluster."""
    program = folder / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@dataclass
class By(Command):
    """Runs the command with a launcher.

    Attributes:
        prefix: The launcher and its arguments.
        variables: Variables added to the environment.
        program: Arguments of Python that select the program.
    """

    prefix: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    program: list[str] = field(default_factory=lambda: ["-m", "axonlaunch"])

    def served(self, server: Server) -> By:
        """Return the same launcher with ranks forked from a server, for tests of started ranks."""
        file = self.folder / "server.pickle"
        file.write_bytes(pickle.dumps(server))
        file.chmod(0o600)
        path = f"{SUPPORT.parent}:{SCRIPTS.parent}"
        variables = {**self.variables, "PYTHONPATH": path}
        return By(self.folder, self.prefix, variables, [str(SUPPORT / "served_rank.py"), str(file)])

    def start(self, *overrides: str) -> Any:
        """Start the command without waiting for it."""
        outputs = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        process = subprocess.Popen(
            [*self.prefix, sys.executable, *self.program, *overrides],
            cwd=self.folder,
            stdout=outputs[0],
            stderr=outputs[1],
            stdin=subprocess.DEVNULL,
            text=True,
            env={**self.environment(), **self.variables},
        )
        return _Process(process, outputs)


def torchrun(folder: Path, nproc: int, *options: str) -> By:
    """Return the command, started by torchrun on this node."""
    prefix = [str(BIN / "torchrun"), f"--nproc-per-node={nproc}", "--no-python", *options]
    return By(folder, prefix)


class _Process:
    """A process whose children may keep its output open after its end."""

    def __init__(self, process: subprocess.Popen[str], outputs: list[Any]) -> None:
        self._process = process
        self._outputs = outputs

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"still running after {timeout} s\n{self._read()}") from None
        return self._read()

    def _read(self) -> tuple[str, str]:
        texts = []
        for output in self._outputs:
            output.seek(0)
            texts.append(output.read())
            output.close()
        return texts[0], texts[1]


@dataclass
class On(Command):
    """Runs the command on a simulated node, forked from a server that tests share.

    Attributes:
        server: Address of the server.
        namespace: Network namespace of the node.
        variables: Variables added to the environment.
    """

    server: Server
    namespace: str
    variables: dict[str, str] = field(default_factory=dict)

    def start(self, *overrides: str) -> served.Forked:
        """Start the command without waiting for it."""
        there = partial(served.placed, self.namespace)
        command = partial(served.command, self.server, *overrides, around=there)
        return served.Forked(
            served.placed,
            self.namespace,
            command,
            folder=self.folder,
            environment={**self.environment(), **self.variables},
        )


@dataclass
class NodeNamespaces:
    """Nodes on one network, each a network namespace with its IP address.

    Attributes:
        folder: Working directory of the commands.
        names: Names of the namespaces.
        addresses: IP addresses of the nodes.
        server: Server that commands are forked from; None starts a new interpreter for each.
    """

    folder: Path
    names: list[str]
    addresses: list[str]
    server: Server | None = None

    def command(self, node: int, **variables: str) -> Command:
        """Return a ``Command`` that runs on a node."""
        if self.server is not None:
            return On(self.folder, self.server, self.names[node], variables)
        return By(self.folder, self.prefix(node), variables)

    def prefix(self, node: int) -> list[str]:
        """Return the arguments that run a program on a node."""
        return ["ip", "netns", "exec", self.names[node]]

    def start(self, *overrides: str, nproc: int) -> list[Any]:
        """Start a run on all nodes, described by environment variables."""
        world = {
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": "29500",
            "WORLD_SIZE": str(nproc * len(self.names)),
        }
        return [
            self.command(node, **world, RANK=str(nproc * node)).start(
                "train", *overrides, f"launch.nproc={nproc}"
            )
            for node in range(len(self.names))
        ]

    def pull(self, node: int) -> None:
        """Disconnect a node from the network."""
        _ip("link", "set", _cable(self.names[node]), "down")

    def plug(self, node: int) -> None:
        """Connect a node again."""
        _ip("link", "set", _cable(self.names[node]), "up")

    def listening(self, node: int) -> list[str]:
        """Return the addresses of a node's listening sockets."""
        program = [*self.prefix(node), "ss", "-Htln"]
        reported = subprocess.run(program, capture_output=True, text=True, check=True).stdout
        return [line.split()[3] for line in reported.splitlines()]


def _ip(*overrides: str) -> None:
    subprocess.run(["ip", *overrides], check=True, capture_output=True)


def _cable(name: str) -> str:
    return f"v{name}"


@contextmanager
def node_namespaces(
    folder: Path, count: int, server: Server | None = None
) -> Iterator[NodeNamespaces]:
    """Create nodes; at the end remove them and kill all of their processes."""
    needs("ip", "ss")
    tag = f"ax{os.getpid()}"
    names = [f"{tag}{chr(ord('a') + node)}" for node in range(count)]
    addresses = [f"10.77.0.{node + 1}" for node in range(count)]
    bridge = f"b{tag}"
    try:
        try:
            _ip("link", "add", bridge, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        _ip("link", "set", bridge, "up")
        for name, address in zip(names, addresses, strict=True):
            _ip("netns", "add", name)
            _ip("link", "add", _cable(name), "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", _cable(name), "master", bridge, "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield NodeNamespaces(folder, names, addresses, server)
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)
            with suppress(subprocess.CalledProcessError):
                _ip("link", "del", _cable(name))
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", bridge)


def _ending_with_this_process(script: str) -> list[Path | str]:
    """Return the command of a script whose cluster ends when these tests end, even if killed."""
    return [SCRIPTS / script, "--until", str(os.getpid())]


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run a cluster of two node daemons; yield the environment that reaches it."""
    needs("slurmctld", "slurmd", "munged", "srun", "sbatch")
    program = _ending_with_this_process("slurm-up")
    subprocess.run([*program, folder], check=True, capture_output=True, timeout=60)
    try:
        yield {"SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([SCRIPTS / "slurm-up", "--down", folder], check=True, timeout=60)


@contextmanager
def kubernetes(folder: Path, definitions: Path | None = None) -> Iterator[Path]:
    """Run a cluster whose pods are processes of this machine; yield its folder.

    Args:
        folder: Folder of the cluster.
        definitions: Folder with definitions of custom resources, for which another server runs.
    """
    needs("openssl", "unshare")
    path = f"{BIN}:{os.environ['PATH']}"
    started = subprocess.run(
        [*_ending_with_this_process("kube-up"), folder, *([definitions] if definitions else [])],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
    )
    if started.returncode == _NOT_BUILT:
        pytest.skip(started.stderr.strip().removeprefix("error: "))
    assert started.returncode == 0, started.stderr
    try:
        yield folder
    finally:
        subprocess.run([SCRIPTS / "kube-up", "--down", folder], check=True, timeout=60)


def ended(processes: list[Any], *, timeout: float = 60) -> list[tuple[int, str, str]]:
    """Wait for processes; return status, output and errors of each."""
    reported = []
    for process in processes:
        output, errors = process.communicate(timeout=timeout)
        reported.append((process.returncode, output, errors))
    return reported


def logged(path: Path, lines: int, *, seconds: float = 200) -> None:
    """Wait until a run has logged a number of steps."""
    wait_for(lambda: path.exists() and path.read_text().count("\n") >= lines, seconds=seconds)
