"""What CUDA and NCCL hold of a device that does not follow from a run: each with its source.

Nobody has checked them against a run of this program: ``scripts/gpu memory`` prints the process's
bytes beside the estimate. They are 0.4 GiB of a device for a rank alone, and 1.1 GiB and more for
one in a world; half as much or twice as much is possible with other versions of NCCL, which
``estimate.margin`` (a tenth of all) covers from 12 GiB on. The allocator's own constants are
``caching_allocator``'s, and exact.
"""

from axonlaunch.system.formatting import MIB

CUBLAS_THREADS = 2
"""Threads that multiply, each with a workspace of its own: that of forward and autograd's."""
DETERMINISTIC_WORKSPACE = 32 * MIB
"""Their workspace under ``train.deterministic``, which sets 8 buffers of 4 MiB on any device."""
CUDA_CONTEXT = 426 * MIB
"""The driver's context with torch's kernels loaded when they are first used.

Source: nvidia-smi, PyTorch 2.10 and CUDA 13.0 on an RTX 6000 Ada, unslothai/unsloth-zoo#1053;
ptrblck gives "around 400MB" since CUDA 11.7, pytorch/pytorch#109888. Not checked against a run.
"""
SYMMETRIC_PAGE = 2 * MIB
"""What memory that other GPUs can map is rounded up to: the driver's recommended granularity."""
NCCL_PAIR, NCCL_RING = 544 * MIB, 688 * MIB
"""What NCCL holds for a communicator of two ranks, and of more.

Source: 4 A100 with NVLink, NVIDIA/nccl#964. Not checked against a run.
"""
