"""The private names of torch that models and what is above them stand on: all of them here.

``tests/house/test_private_names.py`` pins each: when torch moves one, it says which, and the fix
belongs in this file alone. Those of ``torch.distributed`` are in ``comm/torch_internals.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, is_fake, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as RunningNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = [
    "UNTRACEABLE",
    "BatchNorm",
    "DTensorSpec",
    "Dropout",
    "OpOverload",
    "RunningNorm",
    "StridedShard",
    "TensorMeta",
    "bare_fake",
    "dispatch_keys",
    "fake_impls",
    "in_backward",
    "is_cast_by_autocast",
    "is_fake",
    "is_view",
    "local_tensor",
    "storage_key",
    "unset_fake_temporarily",
    "without_modes",
]

UNTRACEABLE = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
"""What torch raises for an operation that needs values, or that has no fake kernel."""


def storage_key(tensor: Tensor) -> int:
    """Return what all views of a storage share; another storage may get it after this one."""
    key: int = tensor.untyped_storage()._cdata
    return key


def is_view(tensor: Tensor) -> bool:
    """Say whether autograd takes a tensor for a view of another."""
    return tensor._is_view()


def bare_fake(meta: Tensor, device: torch.device) -> Any:
    """Return a fake tensor of a device over one of the meta device, without a mode yet."""
    made = Tensor._make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


def dispatch_keys(tensor: Tensor) -> Any:
    """Return what decides which kernels an operation on the tensor runs."""
    return torch._C._dispatch_key_set(tensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what a DTensor holds, and another tensor as it is.

    ``to_local`` would make a view, also of a freed storage, and takes longer.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_cast_by_autocast(operation: str) -> bool:
    """Say whether CUDA's autocast decides the dtype of an operation, ``"aten::rms_norm"``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation, "AutocastCUDA")


def in_backward() -> bool:
    """Say whether this thread computes gradients; what is recomputed for them counts."""
    return bool(torch._C._current_graph_task_id() != -1)
