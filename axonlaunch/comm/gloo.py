"""gloo groups whose ranks are who they say: connected in time, proven by the run's key, then shut.

gloo takes whoever connects first for the rank it expects, and listens for as long as the group
lives. It cannot be given a connection, so a stranger may still take a rank's place at start-up;
here that ends the run within ``DEADLINE_S`` and says which rank was not reached.
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

from axonlaunch.comm.authenticated_store import AuthenticatedStore
from axonlaunch.comm.errors import UnreachableRankError
from axonlaunch.comm.torch_internals import gloo_options, set_timeout
from axonlaunch.system.authentication import derive_key

DEADLINE_S = 20.0
"""Seconds in which the ranks of a group must have connected, once all have come to it."""
_LEAST_S = 2.0
"""Seconds that a proof gets at least, however late the connections were."""
_LOOK_AGAIN = timedelta(seconds=5)
_PROOF_BYTES = 32
_Gloo: Any = dist.ProcessGroupGloo  # torch's stub leaves most of it out
_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own


@contextmanager
def proven_groups(store: dist.Store, *, rank: int) -> Iterator[None]:
    """Make every gloo group that torch creates inside prove its ranks, device meshes' too.

    torch offers no option by which its groups get devices of ours, so the name under which it makes
    them is another's meanwhile; ``tests/comm/test_gloo.py`` says what to do when that moves.

    Args:
        store: Of the world. Without credentials of its own (a file in a private folder) the key is
            known to all: a stranger that knows this protocol is not noticed, any other is.
        rank: Of this process in the world.
    """
    key = store.credentials.key if isinstance(store, AuthenticatedStore) else derive_key(b"")

    class Gloo(_Proven, rank=rank, key=key):
        """What torch takes for ``ProcessGroupGloo``."""

    module: Any = distributed_c10d
    before, module.ProcessGroupGloo = module.ProcessGroupGloo, Gloo
    try:
        yield
    finally:
        module.ProcessGroupGloo = before


class _AsGloo(type):
    """Makes calling a class create a plain gloo group, and every gloo group its instance.

    A subclass would not do: of a group that C++ alone holds Python knows the base class only.
    """

    _rank: int
    _key: bytes

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any
    ) -> _AsGloo:
        made = super().__new__(cls, name, bases, namespace)
        made._rank, made._key = kwargs.get("rank", 0), kwargs.get("key", b"")
        return made

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


class _Proven(metaclass=_AsGloo):
    pass


def connect(
    store: dist.Store, rank: int, size: int, *, timeout: timedelta, world_rank: int, key: bytes
) -> dist.ProcessGroupGloo:
    """Make a gloo group, prove its ranks, and close its ports.

    Args:
        store: Of this group alone.
        rank: Of this process in the group.
        size: Ranks of the group.
        timeout: How long the ranks wait for each other to come, and for each other's operations.
        world_rank: Of this process in the world, for messages.
        key: Of the run.

    Raises:
        UnreachableRankError: A rank could not be connected with, or a stranger is in its place.
        torch.distributed.DistStoreError: A rank never joined.
    """
    challenge = _gather(store, rank, size, world_rank, timeout)
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
            f"{DEADLINE_S:g} s ({reason}); see that no firewall is between them"
        ) from error
    with listeners:
        _prove(group, store, challenge, key, deadline=deadline, listeners=listeners)
    set_timeout(group, timeout)
    return group


def _gather(store: dist.Store, rank: int, size: int, world_rank: int, timeout: timedelta) -> bytes:
    """Wait until all ranks have come; return rank 0's challenge, which is of this group alone.

    A rank that comes late is no failure of the network, so this waits for longer than gloo may, but
    not while somebody deletes what the ranks write.

    Raises:
        UnreachableRankError: Somebody does.
        torch.distributed.DistStoreError: A rank never joined.
    """
    own, places = _place(rank), [_place(other) for other in range(size)]
    store.set(own, f"{world_rank} {secrets.token_hex(16)}")
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.0))
        try:
            store.wait(places, min(left, _LOOK_AGAIN))
            return store.get(places[0])
        except dist.DistStoreError:
            if not store.check([own]):
                message = (
                    f"rank {world_rank} could not be reached: what it wrote into the store of "
                )
                message += "the run was deleted by another program; start the run again"
                raise UnreachableRankError(message) from None
            if left <= _LOOK_AGAIN:
                raise


def _place(rank: int) -> str:
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
    """Exchange proofs with each rank over its own connection, one for each device.

    A proof names both ends, so it can't be sent back or passed on to another.

    Raises:
        UnreachableRankError: A rank sent none in time, or a wrong one.
    """
    rank, others = group.rank(), [other for other in range(group.size()) if other != group.rank()]

    def proof(sender: int, receiver: int) -> bytes:
        return hmac.digest(key, b"%s %d to %d" % (challenge, sender, receiver), "sha256")

    def as_tensor(content: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    at = listeners.addresses
    for tag in range(len(listeners.devices)):  # gloo spreads messages over devices by their tags
        sent = [group.send([as_tensor(proof(rank, other))], other, tag) for other in others]
        received = {other: as_tensor(bytes(_PROOF_BYTES)) for other in others}
        works = {other: group.recv([received[other]], other, tag) for other in others}
        for other, work in works.items():
            try:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), _LEAST_S)))
            except RuntimeError as error:
                _refuse(store, rank, other, at, "did not answer", error)
            if not hmac.compare_digest(bytes(received[other].tolist()), proof(other, rank)):
                with suppress(RuntimeError):  # that the other reads ours before we end
                    for sending in sent:
                        sending.wait(timedelta(seconds=max(deadline - time.monotonic(), _LEAST_S)))
                _refuse(store, rank, other, at, "answered without the run's key", None)
        for work in sent:
            work.wait()


def _refuse(
    store: dist.Store, rank: int, other: int, at: list[str], what: str, error: Exception | None
) -> NoReturn:
    here, there = (int(store.get(_place(member)).split()[0]) for member in (rank, other))
    raise UnreachableRankError(
        f"rank {here} could not reach rank {there} over gloo: the connection that stands for it "
        f"{what}; another program connected to {' or '.join(at)} in its place, or the network "
        "between them fails; start the run again"
    ) from error


class _Listeners:
    """The ports of new gloo devices, closed on leaving; connections stay.

    gloo closes them with the group alone. A socket that was shut down listens no more; gloo's event
    loop must forget it before, or it would be woken for ever.

    Attributes:
        devices: gloo's, one an interface.
        addresses: Where they listen.
    """

    def __init__(self) -> None:
        before = _descriptors()
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        self.devices = [_Gloo.create_device(interface=name) for name in names]
        if not names:
            self.devices = [_Gloo.create_default_device()]
        made = _kinds(_descriptors() - before)
        loops = [number for number, kind in made.items() if kind.endswith("[eventpoll]")]
        sockets = {number for number, kind in made.items() if kind.startswith("socket:")}
        # Another thread may have opened a port at the same time; gloo's own are in a new loop.
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
        """Do nothing: they listen already."""

    def __exit__(self, *error: object) -> None:
        for number, loop in self._listening.items():
            with select.epoll.fromfd(os.dup(loop)) as events, _borrow_socket(number) as listener:
                events.unregister(number)
                listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrow_socket(number: int) -> Iterator[socket.socket]:
    """Use another's socket, which stays open."""
    with socket.socket(fileno=os.dup(number)) as borrowed:
        yield borrowed


def _watched_descriptors(loop: int) -> list[int]:
    """Return the descriptors that an epoll waits for (proc_pid_fdinfo(5))."""
    lines = Path(f"/proc/self/fdinfo/{loop}").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]


def _descriptors() -> set[int]:
    """Return the open descriptors of this process; none where the system does not say."""
    folder = Path("/proc/self/fd")
    return {int(entry.name) for entry in folder.iterdir()} if folder.is_dir() else set()


def _kinds(numbers: set[int]) -> dict[int, str]:
    """Return what each descriptor is; one that was closed meanwhile is left out."""
    kinds: dict[int, str] = {}
    for number in numbers:
        with suppress(OSError):
            kinds[number] = str(Path(f"/proc/self/fd/{number}").readlink())
    return kinds
