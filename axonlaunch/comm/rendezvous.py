"""How a process finds its world: the environment it was started with, and the store they share.

It reads the variables that every launcher of torch sets; it invents none of its own.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

_IDENTITY = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Place:
    """Where this process stands in its world.

    Attributes:
        master_addr: The host of rank 0, or None where nobody has to be found.
        alone: The environment says nothing, so this is a world of one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str | None = None
    master_port: int = 0
    alone: bool = True

    @property
    def on_loopback(self) -> bool:
        """Whether no other machine takes part, so that nothing may listen to the network."""
        return self.alone or (self.master_addr is not None and is_loopback(self.master_addr))


def local_place(rank: int, world_size: int, *, port: int = 1) -> dict[str, str]:
    """Return the environment of one rank of a world that is all on this machine.

    Args:
        rank: The rank.
        world_size: How many there are.
        port: Where they meet; anything where ``World.init`` is given a store.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def find_place(environment: Mapping[str, str], *, store: dist.Store | None = None) -> Place:
    """Read the place of this process from its environment.

    Args:
        environment: ``os.environ``.
        store: Where the ranks meet, if they have a store: rank 0's address is not needed then.

    Raises:
        ValueError: Some of the variables are missing or senseless; the message names all.
    """
    needed = _IDENTITY + _ADDRESS if store is None else _IDENTITY
    if not any(environment.get(name) for name in needed):
        return Place()
    problems = [f"{name} is not set" for name in needed if not environment.get(name)]
    numbers: dict[str, int] = {}
    for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("MASTER_PORT", 1)):
        text = environment.get(name, "")
        if not text or name not in needed:
            continue
        if not text.isascii() or not text.isdigit() or int(text) < least:
            problems.append(f"{name}={text!r} is not a whole number from {least}")
        else:
            numbers[name] = int(text)
    for name, limit, said in (
        ("RANK", numbers.get("WORLD_SIZE"), "WORLD_SIZE="),
        ("LOCAL_RANK", numbers.get("WORLD_SIZE"), "WORLD_SIZE="),
        ("MASTER_PORT", 65536, ""),
    ):
        if name in numbers and limit is not None and numbers[name] >= limit:
            problems.append(f"{name}={numbers[name]} is not below {said}{limit}")
    if problems:
        raise ValueError(
            f"the environment describes no world: {'; '.join(problems)}. A launcher sets all of "
            f"{', '.join(needed)}; with none of them set this is a world of one"
        )
    return Place(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        master_addr=environment.get("MASTER_ADDR") or _host_of(store),
        master_port=numbers.get("MASTER_PORT", 0),
        alone=False,
    )


def _host_of(store: dist.Store | None) -> str | None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else None


def is_loopback(host: str) -> bool:
    """Say whether a host is this machine by name or number, whoever asks."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "localhost.localdomain")


def open_store(place: Place, *, timeout: timedelta) -> dist.Store | None:
    """Open the store that the ranks of a world meet at; None where torch's own way is right.

    torch's rank 0 listens to the whole network. Where rank 0 is on a loopback address, it
    listens there instead.

    Raises:
        ValueError: The port is taken.
    """
    if place.alone:
        return dist.HashStore()
    agent_hosts_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if agent_hosts_it or not place.on_loopback:
        return None
    assert place.master_addr is not None
    listener = _listen(place.master_addr, place.master_port) if place.rank == 0 else None
    return dist.TCPStore(
        place.master_addr,
        place.master_port,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listen(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"MASTER_PORT={port}: rank 0 can't listen on {host}:{port} ({error.strerror}); "
            "give all ranks another free port"
        ) from error
    return listener


@contextlib.contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Make the gloo groups created inside listen on the loopback interface only.

    gloo takes the interface from the environment and nowhere else. One that the user has named
    is left alone.
    """
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is None or os.environ.get(_GLOO_INTERFACE):
        yield
        return
    os.environ[_GLOO_INTERFACE] = loopback
    try:
        yield
    finally:
        os.environ.pop(_GLOO_INTERFACE, None)
