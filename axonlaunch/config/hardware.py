"""What one device of a kind has and can do, as its maker publishes it.

It holds figures; nothing here is measured on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """One device, and how it reaches its neighbours."""

    name: str
    """name of the device"""
    memory_gib: float | None = field(default=None, metadata={"above": 0})
    """memory of one device, GiB; null: this machine's memory shared among its ranks"""
    bf16_tflops: float | None = field(default=None, metadata={"above": 0})
    """dense bf16 matrix peak, TFLOP/s, without sparsity; null: not published"""
    memory_bandwidth_gb_s: float | None = field(default=None, metadata={"above": 0})
    """device memory bandwidth, GB/s (1e9)"""
    link_gb_s: float | None = field(default=None, metadata={"above": 0})
    """bandwidth to the other devices of its node, one direction, GB/s (1e9)"""
