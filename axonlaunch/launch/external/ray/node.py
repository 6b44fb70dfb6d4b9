"""The actor of a node: runs the node's process, and sends its output to the run's actor."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from axonlaunch.launch.environment.environment_variables import SUBMISSION, without_launchers
from axonlaunch.launch.external.ray.run_spec import RunSpec

PROGRAM = "axonlaunch.launch.external.ray.node_process"
_GATHER_S = 0.2
"""Seconds in which output is gathered before it is sent."""
_CHUNK = 1 << 16


class Node:
    """A node of a run.

    Its methods are called in separate threads, so that ``stop`` reaches a node that trains.
    """

    def __init__(self, spec: RunSpec, number: int, run: Any) -> None:
        """Prepare the node.

        Args:
            spec: Specification of the run.
            number: Number of this node.
            run: Handle of the run's actor, which receives the output.
        """
        self._spec, self._number, self._run = spec, number, run
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> tuple[str, int]:
        """Return an address of this node that other nodes reach, and a free port."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def train(self, host: str, port: int) -> int:
        """Run the process of this node until it ends, and return its exit status.

        Args:
            host: Address of node 0.
            port: Port at which the nodes meet.
        """
        with tempfile.TemporaryDirectory(prefix="axonlaunch-") as folder:
            arguments = self._write_files(Path(folder), host, port)
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM, folder, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**without_launchers(os.environ), SUBMISSION: self._spec.submission},
            )
            assert process.stdout is not None
            while chunk := os.read(process.stdout.fileno(), _CHUNK):
                self._run.append.remote(self._number, chunk)
                time.sleep(_GATHER_S)
            return process.wait()

    def stop(self) -> None:
        """Let the process save a checkpoint and end. Further calls do nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)

    def _write_files(self, folder: Path, host: str, port: int) -> list[str]:
        """Write the configuration and the token, and return the arguments of the command."""
        spec = self._spec
        (folder / "job.yaml").write_text(spec.config)
        arguments = ["train", "--config-dir", str(folder), "--config-name", "job"]
        if spec.nnodes > 1:
            token = folder / "token"
            token.touch(mode=0o600)
            token.write_text(spec.token)
            arguments += [
                *(f"launch.node_rank={self._number}", f"launch.master_addr={host}"),
                *(f"launch.master_port={port}", f"launch.token_file={token}"),
            ]
        return arguments
