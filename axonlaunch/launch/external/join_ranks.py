"""Connects ranks that another launcher started, and distributes one configuration to them.

The ranks exchange signed messages over torch's store.
"""

from __future__ import annotations

import dataclasses
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from axonlaunch import config as configuration
from axonlaunch.comm.connection.authenticated_store import Channel
from axonlaunch.comm.connection.rendezvous import is_loopback, meet_at
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.options.launch import LaunchConfig
from axonlaunch.config.problems.errors import plain
from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
from axonlaunch.launch.multinode import run_identity, token
from axonlaunch.launch.multinode.coordination import Coordinator
from axonlaunch.launch.multinode.handshake import handshake, member_name
from axonlaunch.launch.run_folder.open_folder import create_joined
from axonlaunch.system import gpus
from axonlaunch.system.authentication import Credentials, ForgedMessageError, derive_key

JOIN_S = 300.0
"""Timeout in seconds until all ranks have joined, and of the silence of rank 0 after that."""
_AGENT_S = 10.0
"""Timeout in seconds for torchrun's agent, which listens before it starts a rank."""
_REPORT_S = 1.0
"""Seconds in which rank 0 can print the reason why a run is refused."""
_FORGED = (
    "what is in the store there was not written by a rank of this run: give every rank the "
    "same launch.token_file, and let no one else reach the port"
)


def message_key(environment: ClusterEnvironment, launch: LaunchConfig) -> bytes:
    """Return the key of the run's messages. Rank 0 prints a warning if there is no secret.

    Without a token file, the ranks of a run on one node use the token in the user's cache folder.

    Raises:
        ConfigError: The token file is not a valid secret, or it is required and missing.
    """
    secret = token.read_token(launch)
    assert environment.master_addr is not None
    if secret is None and (
        environment.local_world_size == environment.world_size
        or is_loopback(environment.master_addr)
    ):
        secret = token.user_token()
    if secret is None:
        warning = token.missing_token(
            launch, address=f"{environment.master_addr}:{environment.master_port}"
        )
        if environment.rank == 0:
            print(warning, file=sys.stderr)
    return derive_key(secret or b"")


def join_ranks(
    environment: ClusterEnvironment, key: bytes
) -> tuple[Channel, list[dict[str, Any]] | None, list[str]]:
    """Meet the other ranks.

    Returns:
        The channel between the ranks, the descriptions of all ranks (only on rank 0), and the
        nonces for ``Coordinator``.

    Raises:
        ConfigError: The ranks can't meet.
    """
    job, address = _job_store(environment)
    named = _identify_run(environment, job, key, address)
    credentials = named.with_sender(member_name(environment.rank))
    channel = Channel(run_identity.keys_of(job, credentials, "members"), credentials)
    about = {
        "host": socket.gethostname(),
        "local_rank": environment.local_rank,
        "devices": _devices(),
    }
    try:
        members, nonces = handshake(
            channel,
            member=environment.rank,
            members=environment.world_size,
            unit="rank",
            about=about,
            timeout_s=JOIN_S,
            announce=partial(print, file=sys.stderr),
            confirm=partial(run_identity.keep_identity, job, named),
        )
    except TimeoutError as missing:
        message = f"ranks {missing} did not join within {JOIN_S:g} s"
        world_size = environment.world_size
        problem = ConfigIssue("WORLD_SIZE", message, world_size, is_transient=True)
        raise ConfigError([problem]) from None
    except ForgedMessageError:
        raise ConfigError([ConfigIssue("MASTER_ADDR", _FORGED, address)]) from None
    return channel, members, nonces


def _job_store(environment: ClusterEnvironment) -> tuple[dist.Store, str]:
    """Return torch's store of this job, and its address.

    Raises:
        ConfigError: Nothing listens at the address.
    """
    assert environment.master_addr is not None
    assert environment.master_port is not None
    address = f"{environment.master_addr}:{environment.master_port}"
    waits_s = _AGENT_S if environment.agent_hosts_store else JOIN_S
    try:
        store = meet_at(
            environment.master_addr,
            environment.master_port,
            listens=environment.rank == 0 and not environment.agent_hosts_store,
            timeout=timedelta(seconds=waits_s),
        )
    except ValueError as error:
        raise ConfigError([ConfigIssue("", str(error))]) from None
    except (dist.DistNetworkError, dist.DistStoreError):
        listener = environment.launcher if environment.agent_hosts_store else "rank 0"
        message = (
            f"rank {environment.rank} waited {waits_s:g} s, and {listener} does not listen there"
        )
        problem = ConfigIssue("MASTER_ADDR", message, address, is_transient=True)
        raise ConfigError([problem]) from None
    return dist.PrefixStore(f"axonlaunch/{environment.run_id}", store), address


def _identify_run(
    environment: ClusterEnvironment, job: dist.Store, key: bytes, address: str
) -> Credentials:
    """Begin a run on rank 0, or learn of it on another rank.

    Raises:
        ConfigError: Rank 0 began no run, or a message does not have the key.
    """
    try:
        if environment.rank == 0:
            return run_identity.publish_identity(job, key)
        return run_identity.learn(job, key, timeout_s=JOIN_S)
    except TimeoutError:
        message = f"rank {environment.rank} waited {JOIN_S:g} s, and rank 0 began no run there"
        problem = ConfigIssue("MASTER_ADDR", message, address, is_transient=True)
        raise ConfigError([problem]) from None
    except ForgedMessageError:
        raise ConfigError([ConfigIssue("MASTER_ADDR", _FORGED, address)]) from None


def _devices() -> list[str]:
    try:
        return [device.uuid for device in gpus.devices_of_rank()]
    except RuntimeError as error:
        message = f"CUDA fails on {socket.gethostname()}: {str(error).splitlines()[0]}"
        raise ConfigError([ConfigIssue("launch.backend", message)]) from None


def with_node_counts(
    environment: ClusterEnvironment, members: list[dict[str, Any]] | None
) -> ClusterEnvironment:
    """Add the number of ranks and devices on each node to the environment.

    Raises:
        ConfigError: Nodes have different numbers of ranks.
    """
    assert members is not None
    local_ranks = [member["local_rank"] for member in members]
    nproc = max(local_ranks) + 1
    if local_ranks != list(range(nproc)) * (environment.world_size // nproc):
        message = (
            f"ranks 0 to {environment.world_size - 1} have the local ranks {plain(local_ranks)}; "
            "start the same number on each node, with consecutive ranks (srun --distribution=block)"
        )
        raise ConfigError([ConfigIssue("WORLD_SIZE", message, environment.world_size)])
    visible = [[*member["devices"]] for member in members]
    return dataclasses.replace(
        environment, local_world_size=nproc, devices=devices_each(visible, nproc)
    )


def devices_each(visible_devices: Sequence[Sequence[str]], nproc: int) -> int:
    """Return the number of ranks on each node that can have a separate device.

    A scheduler makes either all devices of the node visible to every rank, which then uses the one
    of its local rank, or one device to each rank. If the same single device is visible to two
    ranks, they share it.

    Args:
        visible_devices: Devices visible to each rank, with the ranks of a node in a row.
        nproc: Number of ranks on a node.
    """
    fewest = min(map(len, visible_devices))
    if fewest != 1:
        return fewest
    nodes = [
        visible_devices[first : first + nproc] for first in range(0, len(visible_devices), nproc)
    ]
    return min(len({devices[0] for devices in node}) for node in nodes)


def frozen_by_rank_0(peers: Coordinator) -> RunConfig | int:
    """Receive the frozen configuration from rank 0, or an exit status if no run begins."""
    try:
        frozen = peers.wait_for("frozen", timeout_s=JOIN_S)
    except (TimeoutError, dist.DistNetworkError, dist.DistStoreError):
        message = (
            "rank 0, which prepares the run, is gone or has given no sign of life for "
            f"{JOIN_S:g} s; see its output, and start all ranks again"
        )
        raise ConfigError([ConfigIssue("", message, is_transient=True)]) from None
    except ForgedMessageError:
        raise ConfigError([ConfigIssue("MASTER_ADDR", _FORGED)]) from None
    if "status" in frozen:
        peers.watch()
        peers.leave()
        if frozen["status"]:
            # A launcher ends all ranks when the first one exits, so give rank 0 time to report.
            time.sleep(_REPORT_S)
        return int(frozen["status"])
    config = configuration.parse_frozen(frozen["config"])
    create_joined(config)
    return config
