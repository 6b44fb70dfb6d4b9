"""Creates gloo groups with authenticated ranks and closes their listening ports afterwards.

gloo accepts the first connection for each rank and listens as long as the group exists. It can't be
given existing connections, so an unknown program may still take a rank's place at start-up. In that
case the run ends within ``DEADLINE_S``, and the error says which rank was not reached.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from axonlaunch.comm.connection.authenticated_store import AuthenticatedStore
from axonlaunch.comm.errors import UnreachableRankError
from axonlaunch.comm.torch_internals import gloo_options, set_timeout
from axonlaunch.system.authentication import derive_key

DEADLINE_S = 20.0
"""Maximum time in seconds to connect the ranks of a group, after all of them have arrived."""
_MIN_PROOF_S = 2.0
"""Minimum time in seconds for exchanging proofs, even if connecting took long."""
_CHECK_INTERVAL = timedelta(seconds=5)
_PROOF_BYTES = 32
_Gloo: Any = dist.ProcessGroupGloo  # torch's type stub is incomplete
_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's default


@contextmanager
def authenticated_groups(store: dist.Store, *, rank: int) -> Iterator[None]:
    """Authenticate the ranks of every gloo group that torch creates in this context.

    This includes groups of device meshes. torch has no option for custom devices of its groups, so
    its name for the gloo class is replaced meanwhile. ``tests/comm/test_gloo.py`` says what to do
    when torch moves that name.

    Args:
        store: Store of the world. If it has no credentials (a file in a private folder), the key is
            public: programs that don't know this protocol are detected, others are not.
        rank: Rank of this process in the world.
    """
    key = store.credentials.key if isinstance(store, AuthenticatedStore) else derive_key(b"")

    class Gloo(_Authenticated, rank=rank, key=key):
        """Replacement for torch's ``ProcessGroupGloo``."""

    module: Any = distributed_c10d
    original, module.ProcessGroupGloo = module.ProcessGroupGloo, Gloo
    try:
        yield
    finally:
        module.ProcessGroupGloo = original


class _AsGloo(type):
    """Metaclass: calling the class creates a plain gloo group, and gloo groups are its instances.

    A subclass does not work, because Python sees only the base class of a group that only C++
    holds.
    """

    _rank: int
    _key: bytes

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any
    ) -> _AsGloo:
        gloo_class = super().__new__(cls, name, bases, namespace)
        gloo_class._rank, gloo_class._key = kwargs.get("rank", 0), kwargs.get("key", b"")
        return gloo_class

    def __init__(cls, *args: Any, **kwargs: Any) -> None:
        del kwargs
        super().__init__(*args)

    def __call__(
        cls, store: dist.Store, rank: int, size: int, timeout: timedelta = _DEFAULT_TIMEOUT
    ) -> dist.ProcessGroupGloo:
        return connect(store, rank, size, timeout=timeout, world_rank=cls._rank, key=cls._key)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Gloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_Gloo, name)


class _Authenticated(metaclass=_AsGloo):
    pass


def connect(
    store: dist.Store, rank: int, size: int, *, timeout: timedelta, world_rank: int, key: bytes
) -> dist.ProcessGroupGloo:
    """Create a gloo group, authenticate its ranks, and close its listening ports.

    Args:
        store: Store that only this group uses.
        rank: Rank of this process in the group.
        size: Number of ranks in the group.
        timeout: Timeout for the arrival of all ranks, and for the group's operations.
        world_rank: Rank of this process in the world, for messages.
        key: Secret key of the run.

    Raises:
        UnreachableRankError: The connection to a rank failed, or an unknown program took its place.
        torch.distributed.DistStoreError: A rank never joined.
    """
    challenge = _await_all(store, rank, size, world_rank, timeout)
    deadline = time.monotonic() + DEADLINE_S
    listeners = _Listeners()
    until_connected = min(timeout, timedelta(seconds=DEADLINE_S))
    options = gloo_options(
        listeners.devices, threads=2 * len(listeners.devices), timeout=until_connected
    )
    try:
        group: dist.ProcessGroupGloo = _Gloo(store, rank, size, options)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UnreachableRankError(
            f"rank {world_rank} could not connect with every rank of its group over gloo within "
            f"{DEADLINE_S:g} s ({reason}); make sure that no firewall is between them"
        ) from error
    with listeners:
        _prove(group, store, challenge, key, deadline=deadline, listeners=listeners)
    set_timeout(group, timeout)
    return group


def _await_all(
    store: dist.Store, rank: int, size: int, world_rank: int, timeout: timedelta
) -> bytes:
    """Wait until all ranks have arrived; return rank 0's challenge, which is unique to this group.

    A late rank is not a network failure, so the wait is longer than gloo's. It ends early if
    another program deletes the ranks' entries in the store.

    Raises:
        UnreachableRankError: Another program deletes entries.
        torch.distributed.DistStoreError: A rank never joined.
    """
    own_key, keys = _arrival_key(rank), [_arrival_key(other) for other in range(size)]
    store.set(own_key, f"{world_rank} {secrets.token_hex(16)}")
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        remaining = timedelta(seconds=max(deadline - time.monotonic(), 0.0))
        try:
            store.wait(keys, min(remaining, _CHECK_INTERVAL))
            return store.get(keys[0])
        except dist.DistStoreError:
            if not store.check([own_key]):
                message = f"rank {world_rank} could not be reached: its entry in the store of "
                message += "the run was deleted by another program; start the run again"
                raise UnreachableRankError(message) from None
            if remaining <= _CHECK_INTERVAL:
                raise


def _arrival_key(rank: int) -> str:
    return f"came/{rank}"


def _prove(
    group: Any,
    store: dist.Store,
    challenge: bytes,
    key: bytes,
    *,
    deadline: float,
    listeners: _Listeners,
) -> None:
    """Exchange proofs with each rank over each connection, one for each device.

    A proof names both ends, so it can't be sent back or passed on to another rank.

    Raises:
        UnreachableRankError: A rank sent no proof in time, or a wrong one.
    """
    rank, others = group.rank(), [other for other in range(group.size()) if other != group.rank()]

    def proof(sender: int, receiver: int) -> bytes:
        return hmac.digest(key, b"%s %d to %d" % (challenge, sender, receiver), "sha256")

    def as_tensor(content: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    addresses = listeners.addresses
    for tag in range(len(listeners.devices)):  # gloo selects the device by the tag
        sent = [group.send([as_tensor(proof(rank, other))], other, tag) for other in others]
        received = {other: as_tensor(bytes(_PROOF_BYTES)) for other in others}
        works = {other: group.recv([received[other]], other, tag) for other in others}
        for other, work in works.items():
            try:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), _MIN_PROOF_S)))
            except RuntimeError as error:
                _refuse(store, rank, other, addresses, "did not answer", error)
            if not hmac.compare_digest(bytes(received[other].tolist()), proof(other, rank)):
                with suppress(RuntimeError):  # let the other rank read this rank's proof first
                    for sending in sent:
                        sending.wait(
                            timedelta(seconds=max(deadline - time.monotonic(), _MIN_PROOF_S))
                        )
                _refuse(store, rank, other, addresses, "answered without the run's key", None)
        for work in sent:
            work.wait()


def _refuse(
    store: dist.Store,
    rank: int,
    other: int,
    addresses: list[str],
    problem: str,
    error: Exception | None,
) -> NoReturn:
    this_rank, other_rank = (
        int(store.get(_arrival_key(member)).split()[0]) for member in (rank, other)
    )
    raise UnreachableRankError(
        f"rank {this_rank} could not reach rank {other_rank} over gloo: the connection to it "
        f"{problem}; another program connected to {' or '.join(addresses)} instead, or the network "
        "between them fails; start the run again"
    ) from error


class _Listeners:
    """Listening ports of new gloo devices; closed on exit, while connections stay open.

    gloo itself closes the ports only with the group. A socket that was shut down no longer listens.
    gloo's event loop must forget it first, because the loop would be woken forever otherwise.

    Attributes:
        devices: gloo devices, one for each interface.
        addresses: Addresses on which they listen.
    """

    def __init__(self) -> None:
        descriptors_before = _descriptors()
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        self.devices = [_Gloo.create_device(interface=name) for name in names]
        if not names:
            self.devices = [_Gloo.create_default_device()]
        new_descriptors = _kinds(_descriptors() - descriptors_before)
        loops = [number for number, kind in new_descriptors.items() if kind.endswith("[eventpoll]")]
        sockets = {number for number, kind in new_descriptors.items() if kind.startswith("socket:")}
        # Another thread may have opened a port at the same time; gloo's own ports are in a new
        # event loop.
        self._listening = {
            number: loop
            for loop in loops
            for number in _watched_descriptors(loop)
            if number in sockets
        }
        self.addresses = []
        for number in self._listening:
            with _borrow_socket(number) as listener:
                self.addresses.append("{}:{}".format(*listener.getsockname()[:2]))

    def __enter__(self) -> None:
        """Do nothing, because the devices listen already."""

    def __exit__(self, *error: object) -> None:
        for number, loop in self._listening.items():
            with select.epoll.fromfd(os.dup(loop)) as events, _borrow_socket(number) as listener:
                events.unregister(number)
                listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrow_socket(number: int) -> Iterator[socket.socket]:
    """Use a socket with a duplicated descriptor, so that the original stays open."""
    with socket.socket(fileno=os.dup(number)) as borrowed:
        yield borrowed


def _watched_descriptors(loop: int) -> list[int]:
    """Return the descriptors that an epoll instance watches (proc_pid_fdinfo(5))."""
    lines = Path(f"/proc/self/fdinfo/{loop}").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]


def _descriptors() -> set[int]:
    """Return the open descriptors of this process; empty if there is no /proc."""
    folder = Path("/proc/self/fd")
    return {int(entry.name) for entry in folder.iterdir()} if folder.is_dir() else set()


def _kinds(numbers: set[int]) -> dict[int, str]:
    """Return the type of each descriptor; descriptors that were closed meanwhile are left out."""
    kinds: dict[int, str] = {}
    for number in numbers:
        with suppress(OSError):
            kinds[number] = str(Path(f"/proc/self/fd/{number}").readlink())
    return kinds
