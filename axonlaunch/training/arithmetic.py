"""What of torch is set for the whole process before a run's model is built."""

from __future__ import annotations

import os
from typing import Any

import torch

from axonlaunch.config.schema import TrainConfig


def configure_arithmetic(config: TrainConfig) -> None:
    """Choose kernels as a run's configuration says; before anything is computed.

    ``deterministic`` is what torchtitan sets: torch's own switch, without the filling of memory
    that nobody has written yet (a kernel more for each buffer, and no protection where every
    element is written), cuDNN's, and cuBLAS's workspace of fixed size.

    Source: pytorch/torchtitan, ``torchtitan/distributed/utils.py``, ``set_determinism``.
    """
    deterministic = config.deterministic
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    filled: Any = torch.utils.deterministic  # a property that torch has not typed
    filled.fill_uninitialized_memory = not deterministic
    if deterministic:
        torch.backends.cudnn.benchmark = False
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.set_float32_matmul_precision(config.matmul_precision)
