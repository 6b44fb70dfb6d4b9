"""Process-wide settings of torch for determinism, precision and attention kernels."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from axonlaunch.config.schema import TrainConfig

_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_CUDNN_FIRST = (9, 10)
"""Major compute capabilities of devices on which cuDNN's kernel is the fastest: Hopper, Blackwell.

Source: pytorch/pytorch#142132.
"""


def configure_arithmetic(config: TrainConfig) -> None:
    """Set deterministic algorithms and matmul precision. Call this before any computation.

    ``deterministic`` sets the same options as torchtitan: torch's deterministic algorithms, cuDNN's
    deterministic mode and a cuBLAS workspace of fixed size. torch's option to fill uninitialized
    memory is off, because it costs a kernel for each buffer and has no effect if every element is
    written.

    Source: pytorch/torchtitan, ``torchtitan/distributed/utils.py``, ``set_determinism``.
    """
    deterministic = config.deterministic
    if deterministic or config.compile:
        torch.use_deterministic_algorithms(deterministic)
    else:
        torch.set_deterministic_debug_mode("default")  # the same, without an import of the compiler
    torch.backends.cudnn.deterministic = deterministic
    options: Any = torch.utils.deterministic  # the property has no type annotation
    options.fill_uninitialized_memory = not deterministic
    if deterministic:
        torch.backends.cudnn.benchmark = False
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.set_float32_matmul_precision(config.matmul_precision)


def attention_kernels(config: TrainConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which ``scaled_dot_product_attention`` uses the run's kernels.

    With ``auto`` on Hopper and Blackwell, cuDNN's kernel has the highest priority. torch chooses
    this order by default only with newer versions of cuDNN.
    """
    if device.type != "cuda":
        return nullcontext()
    if config.attention_kernel != "auto":
        return sdpa_kernel(_KERNELS[config.attention_kernel])
    if torch.cuda.get_device_capability(device)[0] in _CUDNN_FIRST and torch.version.hip is None:
        return sdpa_kernel([*_KERNELS.values(), SDPBackend.MATH], set_priority=True)
    return nullcontext()
