"""How the ranks that another launcher started meet, and get one configuration.

They meet at torch's store; their messages there are signed.
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
from axonlaunch.comm.authenticated_store import Channel
from axonlaunch.comm.rendezvous import is_loopback, meet_at
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.errors import plain
from axonlaunch.config.launch import LaunchConfig
from axonlaunch.launch import run_dir
from axonlaunch.launch.cluster_environment import ClusterEnvironment
from axonlaunch.launch.multinode import run_identity, token
from axonlaunch.launch.multinode.coordination import Coordinator
from axonlaunch.launch.multinode.handshake import handshake, member_name
from axonlaunch.system import gpus
from axonlaunch.system.authentication import ForgedMessageError, derive_key

JOIN_S = 300.0
"""Seconds in which all ranks have to have been started."""
_AGENT_S = 10.0
"""Seconds in which torchrun's agent has to answer: it listened before it started a rank."""
_REPORT_S = 1.0
"""Seconds that rank 0 has to print why a run is refused."""
_FORGED = (
    "what is in the store there was not written by a rank of this run: give every rank the "
    "same launch.token_file, and let no one else reach the port"
)


def message_key(environment: ClusterEnvironment, launch: LaunchConfig) -> bytes:
    """Return the key of the run's messages; rank 0 says where there is no secret.

    Ranks of one node find the same token in this user's own folder.

    Raises:
        ConfigError: There is a file that is no secret, or none where one is required.
    """
    secret = token.read_token(launch)
    assert environment.master_addr is not None
    if secret is None and (
        environment.local_world_size == environment.world_size
        or is_loopback(environment.master_addr)
    ):
        secret = token.of_this_user()
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
    """Meet the other ranks; rank 0 learns what each said of itself.

    Returns:
        Where they meet, what each said, and the nonces for ``Coordinator``.

    Raises:
        ConfigError: They can't meet.
    """
    assert environment.master_addr is not None
    assert environment.master_port is not None
    where = f"{environment.master_addr}:{environment.master_port}"
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
        raise ConfigError([ConfigIssue("MASTER_ADDR", message, where)]) from None
    job = dist.PrefixStore(f"axonlaunch/{environment.run_id}", store)
    try:
        if environment.rank == 0:
            named = run_identity.publish_identity(job, key)
        else:
            named = run_identity.learn(job, key, timeout_s=JOIN_S)
    except TimeoutError:
        message = f"rank {environment.rank} waited {JOIN_S:g} s, and rank 0 began no run there"
        raise ConfigError([ConfigIssue("MASTER_ADDR", message, where)]) from None
    except ForgedMessageError:
        raise ConfigError([ConfigIssue("MASTER_ADDR", _FORGED, where)]) from None
    credentials = named.of(member_name(environment.rank))
    channel = Channel(run_identity.keys_of(job, credentials, "members"), credentials)
    try:
        about = {
            "host": socket.gethostname(),
            "local_rank": environment.local_rank,
            "devices": _devices(),
        }
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
        raise ConfigError([ConfigIssue("WORLD_SIZE", message, environment.world_size)]) from None
    except ForgedMessageError:
        raise ConfigError([ConfigIssue("MASTER_ADDR", _FORGED, where)]) from None
    return channel, members, nonces


def _devices() -> list[str]:
    try:
        return [device.uuid for device in gpus.devices_of_rank()]
    except RuntimeError as error:
        message = f"CUDA fails on {socket.gethostname()}: {str(error).splitlines()[0]}"
        raise ConfigError([ConfigIssue("launch.backend", message)]) from None


def with_node_counts(
    environment: ClusterEnvironment, members: list[dict[str, Any]] | None
) -> ClusterEnvironment:
    """Add to the environment how many ranks each node has.

    Raises:
        ConfigError: Not all have as many.
    """
    assert members is not None
    local_ranks = [member["local_rank"] for member in members]
    nproc = max(local_ranks) + 1
    if local_ranks != list(range(nproc)) * (environment.world_size // nproc):
        message = (
            f"ranks 0 to {environment.world_size - 1} have the local ranks {plain(local_ranks)}; "
            "start as many on each node, those of one node in a row (srun --distribution=block)"
        )
        raise ConfigError([ConfigIssue("WORLD_SIZE", message, environment.world_size)])
    seen = [[*member["devices"]] for member in members]
    return dataclasses.replace(
        environment, local_world_size=nproc, devices=devices_each(seen, nproc)
    )


def devices_each(seen: Sequence[Sequence[str]], nproc: int) -> int:
    """Return how many ranks of each node can have a device of their own.

    Args:
        seen: The devices that each rank sees, those of one node in a row.
        nproc: Ranks of a node.

    A scheduler shows every rank all devices of its node, of which each takes the one of its local
    rank, or shows each rank its own. Two ranks that are shown the same single device share it.
    """
    fewest = min(map(len, seen))
    if fewest != 1:
        return fewest
    nodes = [seen[first : first + nproc] for first in range(0, len(seen), nproc)]
    return min(len({devices[0] for devices in node}) for node in nodes)


def frozen_by_rank_0(peers: Coordinator) -> RunConfig | int:
    """Take the configuration that rank 0 froze, or the exit status where it launches nothing."""
    try:
        frozen = peers.wait_for("frozen", timeout_s=JOIN_S)
    except TimeoutError:
        message = f"rank 0 sent no configuration within {JOIN_S:g} s"
        raise ConfigError([ConfigIssue("", message)]) from None
    except ForgedMessageError:
        raise ConfigError([ConfigIssue("MASTER_ADDR", _FORGED)]) from None
    if "status" in frozen:
        peers.watch()
        peers.leave()
        if frozen["status"]:
            time.sleep(_REPORT_S)  # a launcher ends all ranks with the first: rank 0 says why
        return int(frozen["status"])
    config = configuration.parse_frozen(frozen["config"])
    run_dir.adopt(config)
    return config
