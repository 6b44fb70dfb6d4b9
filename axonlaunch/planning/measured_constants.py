"""Constants of estimates that come from measurements of GPUs, each with its source.

Figures of a device are in ``configs/hardware``, with their sources. Rules of torch's allocator and
buffers of its kernels follow from torch's code and are defined where they are applied.

Memory: outside torch's allocator, a process needs 0.4 GiB of a device if it is a single rank, and
1.1 GiB or more in a world. With other versions of NCCL this can be off by a factor of 2, which
``estimate.margin`` (10% by default) covers from 12 GiB on; the report of ``axonlaunch estimate``
says so. ``hardware.context_mib`` and ``hardware.communicator_mib`` replace these constants.
``scripts/gpu memory`` measures the context (0.75 GiB on an H200, as in ``hardware=h200``).

Speed: compared with 245 published runs (``scripts/bench throughput``), the median error of step
times is 7.1%. On a congested network a step can take a multiple of that. ``axonlaunch plan`` uses
them only to rank layouts.
"""

from axonlaunch.system.text.formatting import MIB

CUBLAS_THREADS = 2
"""Threads that run matrix products, with one workspace each: the forward and the autograd thread.

Source: PyTorch, ``aten/src/ATen/cuda/CublasHandlePool.cpp``: one workspace per handle and stream.
"""
DETERMINISTIC_WORKSPACE = 32 * MIB
"""Workspace with ``train.deterministic``: 8 buffers of 4 MiB on any device.

Source: NVIDIA, cuBLAS, "Results Reproducibility", ``CUBLAS_WORKSPACE_CONFIG=:4096:8``.
"""
CUDA_CONTEXT = 426 * MIB
"""CUDA context, with torch's kernels loaded lazily.

Source: nvidia-smi, PyTorch 2.10 and CUDA 13.0 on an RTX 6000 Ada, unslothai/unsloth-zoo#1053;
ptrblck gives "around 400MB" since CUDA 11.7, pytorch/pytorch#109888. With NCCL's communicator of
one rank 484 MiB, CUDA 13.0 on an RTX 3090, and 512 more where it connects ahead, NVIDIA/nccl#2366.
"""
SYMMETRIC_PAGE = 2 * MIB
"""Granularity of memory that other GPUs can map.

Source: the driver's recommended granularity, ``cuMemGetAllocationGranularity``.
"""
NCCL_PAIR = 544 * MIB
"""Memory of an NCCL communicator with two ranks.

Source: 4 A100 with NVLink, NVIDIA/nccl#964.
"""
NCCL_RING = 688 * MIB
"""Memory of an NCCL communicator with more than two ranks.

Source: 4 A100 with NVLink, NVIDIA/nccl#964. On 8 H100 a process held 1.06 GB outside torch's
allocator, compared with 1.17 GB for this constant and the context, NVIDIA/nccl#1685.
"""
NCCL_PEER = 447 * MIB
"""Memory of NCCL's 32 channels to another GPU of a node, which the first all-to-all connects.

Source: on 8 H100 a process held 1.06 GB before an all-to-all and 4.34 GB after it,
NVIDIA/nccl#1685. These are 3.28 GB for 7 other GPUs.
"""
COLLECTIVE_S = 6.6e-6
"""Seconds of an empty collective.

Source: NCCL's ``src/graph/tuning.cc``, ring, LL.
"""
CONGESTED_NODES = 58
"""Number of nodes between which collectives reach half of the network's bandwidth.

Congestion and the slowest node of many cost more, the more nodes take part.

Source: fitted on one run, InternEvo's 7B on 1,024 A100 in 128 nodes (tensor 2 x zero1). Without
tensor parallelism the errors on 256, 512 and 1,024 fall from 20%, 30% and 50% to 15%, 14% and 15%.
"""
LAUNCH_S = 47e-6
"""Seconds in which the host starts an operation of an uncompiled block, with the Python around it.

Source: fitted on one run, nanotron's 1B on 16 H100 (tensor 8, micro-batch 1, 6,906 tokens/s for
each, Ultra-Scale Playbook). With tensor 2 on 32 H100 the error falls from 26% to 0%. On one H100
axonlaunch's gpt of 124M waits for its host in a quarter of a step of 78 ms with 1,037 kernels.
"""
HOST_WAIT_S = 26e-6
"""Seconds for which a device is idle when the host reads a number from it.

Source: a round trip on Linux with an RTX 3090, jingyaogong/minimind#837 (116e-6 under WSL2).
"""
HOST_COPIES = 1.4
"""Time that offload adds to a step, relative to copying its larger direction.

Nothing of it is hidden: the copies wait for each other, and some use memory that is not pinned.

Source: scripts/gpu speed on one H100, 1.5B parameters: 1.49 with params, 1.35 with
optimizer_states.
"""
DEFAULT_EFFICIENCY = {
    "matrix_efficiency": 0.79,
    "attention_efficiency": 0.58,
    "link_efficiency": 0.8,
}
"""Efficiencies of devices for which none is published; plans say that they use them.

Source: medians of the devices in ``configs/hardware`` with published figures.
"""
HALF_LENGTH = 512
"""Number of keys at which fused attention reaches half of its rate on long sequences.

Source: published runs; half and twice this value fit them worse. Rounded.
"""
HALF_WAVE = 0.1
"""Number of waves of tiles at which a product reaches half of its rate.

It represents the last wave, which is only partly filled.

Source: fitted with ``HALF_DEPTH`` and ``IN_A_STEP`` on about half of the published runs, once for
all devices together.
"""
HALF_DEPTH = 64
"""Depth k at which the prologue and epilogue of a tile take as long as its product.

Source: as ``HALF_WAVE``.
"""
IN_A_STEP = 0.75
"""Rate of products in a training step, relative to an isolated product.

Source: as ``HALF_WAVE``.
"""
FUSED = 0.4
"""Time of memory-bound kernels after fusion by a compiler, relative to unfused kernels.

Source: fitted on published runs with and without compilation.
"""
DISK_GB_S = 1.0
"""Rate at which a node writes and reads checkpoints, GB/s.

Source: "The Llama 3 Herd of Models", 2024, section 3.3: storage sustains 2 TB/s, for 2,048 nodes.
"""
HOST_GB_S = 63.0
"""Rate of a device's link to its host, GB/s.

Source: PCIe 5.0 with 16 lanes, as in ``configs/hardware/h100_80gb.yaml``.
"""
RESTART_S = 600.0
"""Seconds from a failure to the next step.

Source: with 419 failures in 54 days and saves every ten minutes, it gives the share of effective
time of Llama 3 405B on 16,384 H100, "higher than 90%" ("The Llama 3 Herd of Models", section 3.3).
"""
GPU_HOURS_PER_FAILURE = {
    1_024: (8_000.0, 8_000.0, 30_000.0),
    16_384: (30_000.0, 40_000.0, 50_000.0),
}
"""GPU hours for each failure of a run with this number of devices: low, expected and high.

Failures are not proportional to the number of devices, so two rates are needed.

Source: Kokolis et al., 2024 (arXiv 2410.21680): mean time to failure 7.9 h on 1,024 devices, 1.8 h
on 16,384 and 14 min on 131,072, or 8,090, 29,491 and 30,583 GPU hours. "The Llama 3 Herd of
Models": 419 failures in 54 days on 16,384 devices, or 50,700. The high value of small runs is the
low one of large runs.
"""
