"""Connects to a Ray cluster, and turns reports of Ray into errors that name keys."""

from __future__ import annotations

import os
import re
import socket
from typing import Any
from urllib.parse import urlsplit

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.launch.external.ray.run_actor import RUNNING
from axonlaunch.launch.external.ray.run_spec import RunSpec

_KEY = "launch.ray.address"
_PROBE_S = 5.0
# Otherwise the first call after a lost connection would start a cluster on this node. Ray reads it
# when it is imported.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
_LOCAL = "auto"


def connect_to_cluster(address: str, runtime_env: dict[str, Any] | None = None) -> None:
    """Connect this process to a cluster.

    Args:
        address: Value of ``launch.ray.address``.
        runtime_env: Content of ``launch.ray.runtime_env``. Ray uploads its folders.

    Raises:
        ConfigError: The package ``ray`` is not installed, no cluster is at the address, it has
            another version of Ray or Python, or the runtime environment is not valid.
    """
    try:
        import ray
    except ImportError:
        message = "needs the package ray: pip install 'axonlaunch[ray]'"
        raise ConfigError([ConfigIssue("launch.name", message, "ray")]) from None
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", _LOCAL) if address == _LOCAL else address
    _probe(address)
    try:
        ray.init(
            address=address,
            namespace=RUNNING,
            runtime_env=runtime_env,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (TypeError, ValueError) as error:
        key = _KEY if runtime_env is None else "launch.ray.runtime_env"
        raise ConfigError([ConfigIssue(key, " ".join(str(error).split()))]) from None
    except (ConnectionError, RuntimeError, OSError) as error:
        raise ConfigError([ConfigIssue(_KEY, _reason(str(error)), address)]) from None


def disconnect() -> None:
    """Disconnect this process, so that it can connect again."""
    import ray

    ray.shutdown()


def _probe(address: str) -> None:
    """Check that a process listens at an address; Ray itself waits for half a minute.

    Raises:
        ConfigError: The address has another form, or no process listens there.
    """
    if address == _LOCAL:
        return
    parts = urlsplit(address if "://" in address else f"gcs://{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme not in ("ray", "gcs") or not host:
        message = "is no address of a cluster; write ray://HOST:10001, HOST:6379, or auto"
        raise ConfigError([ConfigIssue(_KEY, message, address)])
    port = port or (10001 if parts.scheme == "ray" else 6379)
    try:
        socket.create_connection((host, port), timeout=_PROBE_S).close()
    except OSError as error:
        reason = error.strerror or error
        message = f"no Ray cluster answers at {host}:{port} ({reason}); ray status shows it there"
        raise ConfigError([ConfigIssue(_KEY, message, address)]) from None


def _reason(text: str) -> str:
    """Return what is wrong with the address, from the message of Ray's error."""
    line = " ".join(text.split())
    if "ersion" in line and "mismatch" in line:
        versions = re.findall(r"(Ray|Python): ([\w.]+)", line)
        found = ", ".join(f"{name} {version}" for name, version in versions)
        return f"the cluster and this command have different versions ({found}); install the same"
    if "Could not find any running Ray instance" in line:
        return (
            "there is no Ray cluster on this node, and RAY_ADDRESS is not set; write "
            "ray://HOST:10001, or start one with ray start --head"
        )
    return f"can't connect ({line[:200]})"


def check_size(spec: RunSpec) -> None:
    """Check that the cluster has enough nodes for a run, including those in use.

    Raises:
        ConfigError: The cluster has too few nodes.
    """
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    fitting = [node for node in alive if _fits(node["Resources"], spec.bundle)]
    if len(fitting) >= spec.nnodes:
        return
    message = (
        f"{len(fitting)} of the cluster's {len(alive)} nodes have {spec.needs}; use fewer nodes or "
        "ranks, or launch.ray.autoscaling=true if the cluster adds nodes"
    )
    raise ConfigError([ConfigIssue("launch.nnodes", message, spec.nnodes)])


def _fits(resources: dict[str, Any], bundle: dict[str, float]) -> bool:
    return all(resources.get(name, 0.0) >= amount for name, amount in bundle.items())
