"""All private names of torch that models and the packages above them use.

``tests/house/test_private_names.py`` tests each name. When torch moves one, the test names it, and
only this file has to change. Private names of ``torch.distributed`` are in
``comm/torch_internals.py``.
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
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm, _NormBase as RunningNorm
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
"""Errors that torch raises for operations that need values or have no fake kernel."""


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies a storage; a later storage may get the same number."""
    key: int = tensor.untyped_storage()._cdata
    return key


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd treats a tensor as a view of another one."""
    return tensor._is_view()


def bare_fake(meta: Tensor, device: torch.device) -> Any:
    """Return a fake tensor on a device from a meta tensor, without a mode."""
    fake = Tensor._make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(fake)
    return fake


def dispatch_keys(tensor: Tensor) -> Any:
    """Return the dispatch keys of a tensor, which select the kernels of its operations."""
    return torch._C._dispatch_key_set(tensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; other tensors are returned unchanged.

    ``to_local`` is slower, and it makes a view even if the storage has been freed.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_cast_by_autocast(operation: str) -> bool:
    """Return whether CUDA's autocast sets the dtype of an operation like ``"aten::rms_norm"``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation, "AutocastCUDA")


def in_backward() -> bool:
    """Return whether this thread is in a backward pass, including its recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)
