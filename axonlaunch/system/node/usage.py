"""Counts the work of this node: time of its cores, and bytes of its disks and networks.

The counters are those of Linux, in ``/proc`` and ``/sys``:
https://docs.kernel.org/filesystems/proc.html, https://docs.kernel.org/block/stat.html and
https://docs.kernel.org/admin-guide/abi-stable.html (``sysfs-class-infiniband``). Other systems
have none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_SECTOR = 512
"""Bytes of a sector in the kernel's statistics, whatever the disk uses."""
_WORD = 4
"""Bytes of a word in the counters of InfiniBand ports."""


@dataclass(frozen=True, kw_only=True)
class NodeCounters:
    """Counters of a node, which only grow.

    Attributes:
        busy: Time in which cores computed, in ticks of the kernel, summed over all cores.
        ticks: Time of all cores, in the same unit.
        disk_read_bytes: Bytes read from disks of this node. Network file systems do not count.
        disk_written_bytes: Bytes written to them.
        received_bytes: Bytes received by network interfaces except loopback, and by InfiniBand.
        sent_bytes: Bytes sent by them.
    """

    busy: int
    ticks: int
    disk_read_bytes: int
    disk_written_bytes: int
    received_bytes: int
    sent_bytes: int

    def since(self, earlier: NodeCounters, *, seconds: float) -> dict[str, float]:
        """Return the use between two readings: the fraction ``cpu``, and bytes per second.

        Args:
            earlier: Earlier reading.
            seconds: Time between the readings.
        """
        ticks = self.ticks - earlier.ticks
        rates = {
            "disk_read": self.disk_read_bytes - earlier.disk_read_bytes,
            "disk_written": self.disk_written_bytes - earlier.disk_written_bytes,
            "received": self.received_bytes - earlier.received_bytes,
            "sent": self.sent_bytes - earlier.sent_bytes,
        }
        # A counter falls if its disk or network interface is removed.
        return {
            "cpu": min(1.0, max(0.0, (self.busy - earlier.busy) / ticks)) if ticks > 0 else 0.0,
            **{f"{name}_bytes_per_s": max(0.0, n / seconds) for name, n in rates.items()},
        }


class NodeUsage:
    """Reads the counters of this node. Its hardware is looked up once, which takes longer."""

    def __init__(self, root: Path = _ROOT) -> None:
        """Look up disks, network interfaces and InfiniBand ports.

        Args:
            root: Folder that contains ``proc`` and ``sys``.
        """
        self._stat, self._network = root / "proc/stat", root / "proc/net/dev"
        self._disks = [disk / "stat" for disk in _hardware(root / "sys/block")]
        self._hardware = {folder.name for folder in _hardware(root / "sys/class/net")}
        ports = list(root.glob("sys/class/infiniband/*/ports/*/counters"))
        self._received = [port / "port_rcv_data" for port in ports]
        self._sent = [port / "port_xmit_data" for port in ports]

    def read(self) -> NodeCounters | None:
        """Return the counters; None if the system has none."""
        try:
            with self._stat.open() as stream:
                times = [int(text) for text in stream.readline().split()[1:9]]
            disks = [_numbers(file) for file in self._disks]
            interfaces = self._interfaces()
            received = sum(_numbers(file)[0] for file in self._received)
            sent = sum(_numbers(file)[0] for file in self._sent)
            return NodeCounters(
                busy=sum(times) - times[3] - times[4],  # idle, and waiting for a disk
                ticks=sum(times),
                disk_read_bytes=sum(disk[2] for disk in disks) * _SECTOR,
                disk_written_bytes=sum(disk[6] for disk in disks) * _SECTOR,
                received_bytes=sum(counts[0] for counts in interfaces) + received * _WORD,
                sent_bytes=sum(counts[8] for counts in interfaces) + sent * _WORD,
            )
        except (OSError, ValueError, IndexError):
            return None

    def _interfaces(self) -> list[list[int]]:
        """Return the counters of network interfaces: of hardware, or of all in a container."""
        lines = (line.partition(":") for line in self._network.read_text().splitlines())
        counts = {name.strip(): counters.split() for name, colon, counters in lines if colon}
        chosen = self._hardware & counts.keys() or counts.keys() - {"lo"}
        return [[int(text) for text in counts[name]] for name in chosen]


def _hardware(folder: Path) -> list[Path]:
    """Return the devices in a folder that are not made by software, as bridges and loops are."""
    return [link.parent for link in folder.glob("*/device")]


def _numbers(file: Path) -> list[int]:
    return [int(text) for text in file.read_text().split()]
