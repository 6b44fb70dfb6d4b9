"""Finds a process's rank and world: environment variables and the store that ranks share.

The variables are those that every torch launcher sets; there are no additional ones.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from axonlaunch.comm.connection.authenticated_store import AuthenticatedStore

_IDENTITY = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # netdevice(7)


@dataclass(frozen=True)
class RankEnvironment:
    """Rank of this process and address of its world.

    Attributes:
        local_world_size: Number of ranks on this node, or None if unknown.
        master_addr: Host of rank 0, or None if it is not needed.
        is_single: Whether this is a world of one rank, because the environment sets no variables.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int = 0
    is_single: bool = True

    @property
    def on_loopback(self) -> bool:
        """Whether all ranks are on this node, so that nothing may listen on the network."""
        return self.is_single or (self.master_addr is not None and is_loopback(self.master_addr))

    def variables(self) -> dict[str, str]:
        """Return the environment variables that a torch launcher would set."""
        values = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port or None,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def local_place(rank: int, world_size: int) -> RankEnvironment:
    """Return the environment of a rank in a world on this node that has a store."""
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        master_addr="127.0.0.1",
        is_single=False,
    )


def find_place(
    environment: Mapping[str, str], *, store: dist.Store | None = None
) -> RankEnvironment:
    """Read the rank and world of this process from its environment.

    Args:
        environment: Environment variables, usually ``os.environ``.
        store: Store through which the ranks meet, if there is one; then rank 0's address is not
            needed.

    Raises:
        ValueError: Some of the variables are missing or invalid; the message names all of them.
    """
    required = _IDENTITY + _ADDRESS if store is None else _IDENTITY
    if not any(environment.get(name) for name in required):
        return RankEnvironment()
    local_world_size = environment.get("LOCAL_WORLD_SIZE", "")
    problems = [f"{name} is not set" for name in required if not environment.get(name)]
    numbers: dict[str, int] = {}
    for name, minimum in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("MASTER_PORT", 1)):
        text = environment.get(name, "")
        if not text or name not in required:
            continue
        if not text.isascii() or not text.isdigit() or int(text) < minimum:
            problems.append(f"{name}={text!r} is not a whole number from {minimum}")
        else:
            numbers[name] = int(text)
    for name, limit, prefix in (
        ("RANK", numbers.get("WORLD_SIZE"), "WORLD_SIZE="),
        ("LOCAL_RANK", numbers.get("WORLD_SIZE"), "WORLD_SIZE="),
        ("MASTER_PORT", 65536, ""),
    ):
        if name in numbers and limit is not None and numbers[name] >= limit:
            problems.append(f"{name}={numbers[name]} is not below {prefix}{limit}")
    if problems:
        raise ValueError(
            f"the environment describes no world: {'; '.join(problems)}. A launcher sets all of "
            f"{', '.join(required)}; with none of them set this is a world of one"
        )
    return RankEnvironment(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        local_world_size=int(local_world_size) if local_world_size.isdigit() else None,
        master_addr=environment.get("MASTER_ADDR") or _host_of(store),
        master_port=numbers.get("MASTER_PORT", 0),
        is_single=False,
    )


def _host_of(store: dist.Store | None) -> str | None:
    while isinstance(store, dist.PrefixStore | AuthenticatedStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else None


def is_loopback(host: str) -> bool:
    """Return whether a host name or address always refers to the local machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "localhost.localdomain")


def open_store(environment: RankEnvironment, *, timeout: timedelta) -> dist.Store:
    """Open the store through which the ranks of a world meet.

    Raises:
        ValueError: Rank 0 can't listen at its address.
    """
    if environment.is_single:
        return dist.HashStore()
    assert environment.master_addr is not None
    agent_hosts_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = environment.rank == 0 and not agent_hosts_it
    store = meet_at(
        environment.master_addr, environment.master_port, listens=listens, timeout=timeout
    )
    if not agent_hosts_it:
        return store
    # The agent's store outlives its ranks. The prefix separates this attempt from earlier ones.
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def meet_at(host: str, port: int, *, listens: bool, timeout: timedelta) -> dist.TCPStore:
    """Open a store at an address, or connect to it.

    torch would listen on all interfaces; this store listens only on the given address.

    Args:
        host: Name or address of the node that listens.
        port: Port of the store.
        listens: Whether this process opens the store.
        timeout: Timeout of connecting, and of each later wait for a key.

    Raises:
        ValueError: This process can't listen there.
        torch.distributed.DistNetworkError: No process listens there within ``timeout``.
    """
    listener = listen(host, port) if listens else None
    return dist.TCPStore(
        host,
        port,
        is_master=listens,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def is_own(host: str) -> bool:
    """Return whether a host is this node, by trying to bind to its address."""
    try:
        family, address = _resolve_address(host, 0)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _resolve_address(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the address family and the address to connect to, preferring IPv4.

    Raises:
        OSError: The host is unknown.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
    return family, address


def listen(host: str, port: int) -> socket.socket:
    """Listen on one of this node's addresses.

    Raises:
        ValueError: The address does not belong to this node, or the port is in use.
    """
    try:
        family, address = _resolve_address(host, port)
    except OSError as error:
        raise ValueError(f"MASTER_ADDR={host}: {error.strerror or error}") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(
                f"MASTER_ADDR={host}: is not an address of this node, where rank 0 listens"
            ) from error
        raise ValueError(
            f"MASTER_PORT={port}: rank 0 can't listen on {host}:{port} ({error.strerror}); "
            "give all ranks another free port"
        ) from error
    return listener


@contextlib.contextmanager
def gloo_towards(host: str) -> Iterator[None]:
    """Make gloo groups that are created in this context listen only on the interface to a host.

    gloo reads the interface only from the environment. An interface that the user has set is not
    changed.
    """
    interface = interface_towards(host)
    if interface is None or os.environ.get(_GLOO_INTERFACE):
        yield
        return
    os.environ[_GLOO_INTERFACE] = interface
    try:
        yield
    finally:
        os.environ.pop(_GLOO_INTERFACE, None)


def interface_towards(host: str) -> str | None:
    """Return the name of the network interface that leads to a host, or None.

    For an address of this node, it is the interface that has the address, although the system would
    use the loopback interface.
    """
    names = [name for _, name in socket.if_nameindex()]
    if is_loopback(host):
        return next((name for name in ("lo", "lo0") if name in names), None)
    try:
        family, address = _resolve_address(host, 9)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # a datagram socket sends nothing here
            local_address = probe.getsockname()[0].partition("%")[0]
    except OSError:
        return None
    return next((name for name in names if local_address in _addresses(name)), None)


def _addresses(interface: str) -> list[str]:
    """Return an interface's IPv4 address and, on Linux, its IPv6 addresses."""
    addresses = []
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        addresses.append(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        digits, *_, name = line.split()
        if name == interface:
            addresses.append(str(ipaddress.IPv6Address(int(digits, 16))))
    return addresses
