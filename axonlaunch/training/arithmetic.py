"""What of torch is set for the whole process before a run's model is built."""

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
    """Choose kernels as a run's configuration says; before anything is computed.

    ``deterministic`` is what torchtitan sets: torch's own switch, without the filling of memory
    that nobody has written yet (a kernel more for each buffer, and no protection where every
    element is written), cuDNN's, and cuBLAS's workspace of fixed size.

    Source: pytorch/torchtitan, ``torchtitan/distributed/utils.py``, ``set_determinism``.
    """
    deterministic = config.deterministic
    if deterministic or config.compile:
        torch.use_deterministic_algorithms(deterministic)
    else:
        torch.set_deterministic_debug_mode("default")  # the same, without an import of the compiler
    torch.backends.cudnn.deterministic = deterministic
    filled: Any = torch.utils.deterministic  # a property that torch has not typed
    filled.fill_uninitialized_memory = not deterministic
    if deterministic:
        torch.backends.cudnn.benchmark = False
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.set_float32_matmul_precision(config.matmul_precision)


def attention_kernels(config: TrainConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return in which ``scaled_dot_product_attention`` has the kernels that a run is to use.

    torch puts cuDNN's first by itself, but only from a version of cuDNN on.
    """
    if device.type != "cuda":
        return nullcontext()
    if config.attention_kernel != "auto":
        return sdpa_kernel(_KERNELS[config.attention_kernel])
    if torch.cuda.get_device_capability(device)[0] in _CUDNN_FIRST and torch.version.hip is None:
        return sdpa_kernel([*_KERNELS.values(), SDPBackend.MATH], set_priority=True)
    return nullcontext()
