"""What estimates take from measurements of GPUs, and neither a run nor a data sheet says.

Each has its source. Figures of a device are in ``configs/hardware``, below theirs; the rules of
torch's allocator and the buffers of its kernels follow from its code, and stand where they are
applied.

What a process holds beside torch's allocator is 0.4 GiB of a device for a rank alone, and 1.1 GiB
and more for one in a world; half as much or twice as much is possible with other versions of NCCL,
which ``estimate.margin`` (a tenth of all) covers from 12 GiB on; ``axonlaunch estimate`` says so
where it counts them. ``scripts/gpu memory`` prints the context of a process beside this one (0.75
GiB on an H200, which ``hardware=h200`` has); ``hardware.context_mib`` and
``hardware.communicator_mib`` take the place of these. Of the
336 published runs that step times are compared with (``scripts/bench throughput``) the median
error is 11.6%; ``axonlaunch plan`` orders layouts by them and promises none.
"""

from axonlaunch.system.formatting import MIB

CUBLAS_THREADS = 2
"""Threads that multiply, each with a workspace of its own: that of forward and autograd's.

Source: PyTorch, ``aten/src/ATen/cuda/CublasHandlePool.cpp``, a workspace a handle and stream.
"""
DETERMINISTIC_WORKSPACE = 32 * MIB
"""Their workspace under ``train.deterministic``: 8 buffers of 4 MiB on any device.

Source: NVIDIA, cuBLAS, "Results Reproducibility", ``CUBLAS_WORKSPACE_CONFIG=:4096:8``.
"""
CUDA_CONTEXT = 426 * MIB
"""The driver's context with torch's kernels loaded when they are first used.

Source: nvidia-smi, PyTorch 2.10 and CUDA 13.0 on an RTX 6000 Ada, unslothai/unsloth-zoo#1053;
ptrblck gives "around 400MB" since CUDA 11.7, pytorch/pytorch#109888. With NCCL's communicator of
one rank 484 MiB, CUDA 13.0 on an RTX 3090, and 512 more where it connects ahead, NVIDIA/nccl#2366.
"""
SYMMETRIC_PAGE = 2 * MIB
"""What memory that other GPUs can map is rounded up to.

Source: the driver's recommended granularity, ``cuMemGetAllocationGranularity``.
"""
NCCL_PAIR = 544 * MIB
"""What NCCL holds for a communicator of two ranks.

Source: 4 A100 with NVLink, NVIDIA/nccl#964.
"""
NCCL_RING = 688 * MIB
"""What NCCL holds for a communicator of more.

Source: 4 A100 with NVLink, NVIDIA/nccl#964. On 8 H100 a process held 1.06 GB beside torch's
allocator, where this and the context are 1.17, and 4.34 GB once all had sent to all, which no
layout here does, NVIDIA/nccl#1685.
"""
COLLECTIVE_S = 6.6e-6
"""Seconds of an empty collective.

Source: NCCL's ``src/graph/tuning.cc``, ring, LL.
"""
HALF_LENGTH = 512
"""Keys at which fused attention reaches half of what it does on long sequences.

Source: published runs, which half and twice as many fit worse; a round figure.
"""
HALF_WAVE = 0.1
"""Waves of tiles that give a product half the rate; stands for the last, partly filled one.

Source: fitted with ``HALF_DEPTH`` and ``IN_A_STEP`` on about half of the published runs, once for
all devices together.
"""
HALF_DEPTH = 64
"""Depth k at which a tile's prologue and epilogue take as long as its product.

Source: as ``HALF_WAVE``.
"""
IN_A_STEP = 0.75
"""Share of the rate that one product alone sustains, that is left in a training step.

Source: as ``HALF_WAVE``.
"""
FUSED = 0.4
"""Share of memory-bound time that is left when a compiler fuses a block's kernels.

Source: fitted on published runs with and without it.
"""
