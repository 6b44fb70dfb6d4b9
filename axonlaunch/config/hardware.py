"""What one device of a kind has and can do, and how it reaches the others, as published.

It holds figures; nothing here is measured on this node. A figure that nobody published is null,
and whoever needs it refuses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from axonlaunch.system.formatting import GIB as GIB


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """One device, its node and the network between nodes; rates count one direction."""

    name: str
    """name of the device"""
    device: str | None = None
    """regular expression of torch's name of the device, by which strategy=auto knows it"""
    memory_gib: float | None = field(default=None, metadata={"above": 0})
    """memory of one device as torch reports it, GiB; null: this node's memory shared among its
    ranks
    """
    fp32_tflops: float | None = field(default=None, metadata={"above": 0})
    """fp32 peak of matrix products as torch does them by default, without TF32, TFLOP/s"""
    tf32_tflops: float | None = field(default=None, metadata={"above": 0})
    """dense TF32 matrix peak, TFLOP/s, without sparsity"""
    fp16_tflops: float | None = field(default=None, metadata={"above": 0})
    """dense fp16 matrix peak, TFLOP/s, without sparsity"""
    bf16_tflops: float | None = field(default=None, metadata={"above": 0})
    """dense bf16 matrix peak, TFLOP/s, without sparsity; null: not published"""
    matrix_efficiency: float | None = field(default=None, metadata={"above": 0, "max": 1})
    """share of the matrix peak that the best shapes of products reach"""
    attention_efficiency: float | None = field(default=None, metadata={"above": 0, "max": 1})
    """share of the matrix peak that fused attention reaches on long sequences"""
    multiprocessors: int | None = field(default=None, metadata={"min": 1})
    """streaming multiprocessors or compute units: tiles of a product that run side by side"""
    cublas_workspace_mib: float = field(default=32.0, metadata={"min": 0})
    """what torch gives cuBLAS to work in, MiB for each of two threads; by default as on Hopper"""
    context_mib: float | None = field(default=None, metadata={"min": 0})
    """what a process that trains holds of a device beside torch's allocator and NCCL, MiB, as
    ``scripts/gpu memory`` prints it; null: 426, of an RTX 6000 Ada
    """
    communicator_mib: float | None = field(default=None, metadata={"min": 0})
    """what NCCL holds of a device for each communicator of a rank, MiB; null: 544 of two ranks and
    688 of more, of 4 A100 with NCCL 2.19
    """
    memory_bandwidth_gb_s: float | None = field(default=None, metadata={"above": 0})
    """device memory bandwidth, GB/s (1e9)"""
    memory_efficiency: float | None = field(default=None, metadata={"above": 0, "max": 1})
    """share of the memory bandwidth that long kernels reach"""
    kernel_bytes: list[float] = field(default_factory=list)
    """bytes that kernels of several sizes read and write, where caches and fresh pages make the
    bandwidth depend on them; rising
    """
    kernel_latency_us: list[float] = field(default_factory=list)
    """microseconds of each of them, beyond those of the smallest kernel"""
    kernel_us: float = field(default=2.0, metadata={"above": 0})
    """time of the smallest kernel beside others in a queue, microseconds; by default what GPUs
    take, fitted once on published measurements
    """
    devices_per_node: int | None = field(default=None, metadata={"min": 1})
    """devices of a node"""
    link: Literal["nvlink", "xgmi", "pcie", "loopback"] | None = None
    """what joins the devices of a node; loopback: gloo's ranks, whose exchanges take the cores that
    would compute meanwhile
    """
    link_gb_s: float | None = field(default=None, metadata={"above": 0})
    """bandwidth of a device to the others of its node, one direction, GB/s (1e9)"""
    link_efficiency: float | None = field(default=None, metadata={"above": 0, "max": 1})
    """share of the link's bandwidth that collectives reach"""
    allgather_bw_gb_s: float | None = field(default=None, metadata={"above": 0})
    """the same of gathers alone, where it is another; null: ``link_gb_s``"""
    link_latency_us: float | None = field(default=None, metadata={"above": 0})
    """time of one step of a collective inside a node, microseconds"""
    network_gb_s: float | None = field(default=None, metadata={"above": 0})
    """bandwidth between nodes for each device, one direction, GB/s (1e9)"""
    network_efficiency: float | None = field(default=None, metadata={"above": 0, "max": 1})
    """share of the network's bandwidth that collectives reach"""
    network_latency_us: float | None = field(default=None, metadata={"above": 0})
    """time of one step of a collective between nodes, microseconds"""
    host_memory_gib: float | None = field(default=None, metadata={"above": 0})
    """memory of a node's host, GiB; null: no node is standard"""
    host_gb_s: float | None = field(default=None, metadata={"above": 0})
    """bandwidth of a device to its host's memory, one direction, GB/s (1e9)"""
    host_efficiency: float | None = field(default=None, metadata={"above": 0, "max": 1})
    """share of that bandwidth that copies of pinned memory reach"""
    price_per_hour: float | None = field(default=None, metadata={"min": 0})
    """price of one device for an hour, in any currency, from which reports count what a run cost;
    null: not counted
    """

    @property
    def is_cpu(self) -> bool:
        """Whether it is this node, whose ranks have cores and no GPU's allocator or driver."""
        return self.name == "cpu"

    def peak_figure(self, *, precision: str, matmul_precision: str) -> str:
        """Return the name of the figure that bounds a run's matrix products.

        Args:
            precision: ``train.precision``.
            matmul_precision: ``train.matmul_precision``: on GPUs ``high`` and ``medium`` both mean
                TF32 (``torch.set_float32_matmul_precision``), on a CPU there is none.
        """
        has_tf32 = matmul_precision != "highest" and not self.is_cpu
        return "tf32_tflops" if precision == "fp32" and has_tf32 else f"{precision}_tflops"

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one device; None where it is not known."""
        return None if self.memory_gib is None else int(self.memory_gib * GIB)
