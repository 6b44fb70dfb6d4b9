"""Published figures of a device, its node and its network.

Nothing here is measured on this node. A figure that is not published is null, and what needs it is
an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from axonlaunch.config.precision import PRECISIONS
from axonlaunch.system.text.formatting import GIB as GIB


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """A device, its node and the network between nodes; bandwidths are for one direction."""

    name: str
    """name of the device"""
    device: str | None = None
    """regular expression that matches torch's name of the device, for detection by strategy=auto"""
    memory_gib: float | None = field(default=None, metadata={"above": 0})
    """memory of one device as reported by torch, GiB; null: the memory of this node, divided among
    its ranks
    """
    fp32_tflops: float | None = field(default=None, metadata={"above": 0})
    """fp32 peak of matrix products without TF32, which is torch's default, TFLOP/s"""
    tf32_tflops: float | None = field(default=None, metadata={"above": 0})
    """dense TF32 matrix peak, TFLOP/s, without sparsity"""
    fp16_tflops: float | None = field(default=None, metadata={"above": 0})
    """dense fp16 matrix peak, TFLOP/s, without sparsity"""
    bf16_tflops: float | None = field(default=None, metadata={"above": 0})
    """dense bf16 matrix peak, TFLOP/s, without sparsity; null: not published"""
    fp8_tflops: float | None = field(default=None, metadata={"above": 0})
    """dense fp8 matrix peak with sums in fp32, TFLOP/s, without sparsity; null: the device has no
    products in torch's float8_e4m3fn
    """
    matrix_efficiency: float | None = field(default=None, metadata={"above": 0, "max": 1})
    """fraction of the matrix peak that products of the best shapes reach"""
    attention_efficiency: float | None = field(default=None, metadata={"above": 0, "max": 1})
    """fraction of the matrix peak that fused attention reaches on long sequences"""
    multiprocessors: int | None = field(default=None, metadata={"min": 1})
    """number of streaming multiprocessors or compute units, which process tiles in parallel"""
    cublas_workspace_mib: float = field(default=32.0, metadata={"min": 0})
    """cuBLAS workspace that torch allocates for each of two threads, MiB; the default is Hopper's
    """
    context_mib: float | None = field(default=None, metadata={"min": 0})
    """device memory of a training process outside torch's allocator and NCCL, MiB, as printed by
    `scripts/gpu memory`; null: 426, measured on an RTX 6000 Ada
    """
    communicator_mib: float | None = field(default=None, metadata={"min": 0})
    """device memory of NCCL for each communicator of a rank, MiB; null: 544 for two ranks and 688
    for more, measured on 4 A100 with NCCL 2.19
    """
    memory_bandwidth_gb_s: float | None = field(default=None, metadata={"above": 0})
    """device memory bandwidth, GB/s (1e9)"""
    memory_efficiency: float | None = field(default=None, metadata={"above": 0, "max": 1})
    """fraction of the memory bandwidth that long kernels reach"""
    kernel_bytes: list[float] = field(default_factory=list)
    """bytes read and written by kernels of several sizes, ascending, for devices with a bandwidth
    that depends on the size because of caches and new pages
    """
    kernel_latency_us: list[float] = field(default_factory=list)
    """time of each kernel in kernel_bytes in addition to the smallest kernel, microseconds"""
    kernel_us: float = field(default=2.0, metadata={"above": 0})
    """time of the smallest kernel in a queue of kernels, microseconds; the default is fitted to
    published measurements on GPUs
    """
    devices_per_node: int | None = field(default=None, metadata={"min": 1})
    """number of devices per node"""
    link: Literal["nvlink", "xgmi", "pcie", "loopback"] | None = None
    """connection between the devices of a node; loopback: ranks on one CPU node with gloo, which
    communicates on the cores that also compute
    """
    link_gb_s: float | None = field(default=None, metadata={"above": 0})
    """bandwidth from one device to the others of its node, one direction, GB/s (1e9)"""
    link_efficiency: float | None = field(default=None, metadata={"above": 0, "max": 1})
    """fraction of the link bandwidth that collectives reach"""
    allgather_bw_gb_s: float | None = field(default=None, metadata={"above": 0})
    """link bandwidth of all-gathers if it differs, one direction, GB/s (1e9); null: link_gb_s"""
    link_latency_us: float | None = field(default=None, metadata={"above": 0})
    """time of one step of a collective inside a node, microseconds"""
    network_gb_s: float | None = field(default=None, metadata={"above": 0})
    """bandwidth between nodes per device, one direction, GB/s (1e9)"""
    network_efficiency: float | None = field(default=None, metadata={"above": 0, "max": 1})
    """fraction of the network bandwidth that collectives reach"""
    network_latency_us: float | None = field(default=None, metadata={"above": 0})
    """time of one step of a collective between nodes, microseconds"""
    host_memory_gib: float | None = field(default=None, metadata={"above": 0})
    """host memory of a node, GiB; null: there is no standard node"""
    host_gb_s: float | None = field(default=None, metadata={"above": 0})
    """bandwidth between a device and host memory, one direction, GB/s (1e9)"""
    host_efficiency: float | None = field(default=None, metadata={"above": 0, "max": 1})
    """fraction of host_gb_s that copies of pinned memory reach"""
    disk_gb_s: float | None = field(default=None, metadata={"above": 0})
    """rate at which all ranks of a node together write and read checkpoints, GB/s (1e9); null: as
    measured for hardware=cpu, otherwise 1, as in the cluster of Llama 3
    """
    restart_s: float | None = field(default=None, metadata={"min": 0})
    """seconds from a failure to the next step, without reading the checkpoint: until it is noticed,
    the node is replaced and the ranks have started; null: 600
    """
    mtbf_gpu_hours: float | None = field(default=None, metadata={"above": 0})
    """device hours for each failure that ends an attempt at a run; null: as published, 8,000 up to
    1,024 devices (30,000 at best), rising to 40,000 (30,000 to 50,000) from 16,384
    """
    price_per_hour: float | None = field(default=None, metadata={"min": 0})
    """price of one device per hour, in any currency, from which plans and reports compute the cost
    of a run; null: no cost is reported
    """
    kwh_per_hour: float | None = field(default=None, metadata={"min": 0})
    """energy of one device per hour with its share of the node and of cooling, kWh; null: no energy
    is reported
    """

    @property
    def is_cpu(self) -> bool:
        """Whether the device is the CPU of this node (``hardware=cpu``)."""
        return self.name == "cpu"

    def peak_figure(self, *, precision: str, matmul_precision: str) -> str:
        """Return the field with the peak rate of a run's matrix products.

        Args:
            precision: ``train.precision``.
            matmul_precision: ``train.matmul_precision``. On GPUs ``high`` and ``medium`` both mean
                TF32 (``torch.set_float32_matmul_precision``); CPUs have no TF32.
        """
        has_tf32 = matmul_precision != "highest" and not self.is_cpu
        chosen = PRECISIONS[precision]
        return chosen.relaxed_peak if has_tf32 else chosen.peak

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one device in bytes; None if it is unknown."""
        return None if self.memory_gib is None else int(self.memory_gib * GIB)
