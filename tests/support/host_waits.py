"""Detects operations that would make the host wait for a GPU, on a machine with only a CPU.

Tensors count as the host's if they belong to the batch, are created without a device, or are
computed only from such tensors. All others count as the device's. The batch counts as page-locked.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import axonlaunch

_PACKAGE = str(Path(axonlaunch.__file__).parent)
_ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "aten.equal.", "_unique", "unique_")
"""Operations that need their result, or its shape, on the host."""
_READING = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
_MAKING = ("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn")


class HostWaits(TorchFunctionMode):
    """Notes each place at which the current thread would wait for its device.

    Attributes:
        places: The waiting operation and the innermost line of the package that calls it.
    """

    def __init__(self, batch: list[Tensor]) -> None:
        super().__init__()
        self.places: list[str] = []
        self._pinned = {tensor.untyped_storage().data_ptr() for tensor in batch}
        self._of_host = set(self._pinned)
        self._kept: list[Any] = []
        self._dispatched = _Dispatched(self)

    def __enter__(self) -> HostWaits:
        super().__enter__()
        self._dispatched.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._dispatched.__exit__(*error)
        super().__exit__(*error)

    def note(self, what: str) -> None:
        stack = traceback.extract_stack()
        ours = [frame for frame in stack if frame.filename.startswith(_PACKAGE)]
        frame = (ours or stack)[-1]
        self.places.append(f"{what} in {frame.filename}:{frame.lineno}")

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name == "is_pinned":
            return self._is(tensors[0], self._pinned)
        if name in ("__getitem__", "__setitem__") and isinstance(args[1], list):
            self.note("an index of the host's")
        if name in _READING and tensors and not self._host(tensors[0]):
            self.note(name)
        if name == "to" and self._names_device(args, kwargs):
            result = func(*args, **kwargs)
            if self._host(tensors[0]):
                if not (kwargs.get("non_blocking") and self._is(tensors[0], self._pinned)):
                    self.note("a copy to the device")
                result = result.clone()
            return result
        if len({self._host(tensor) for tensor in tensors if tensor.ndim}) > 1:
            self.note(f"{name} of the host and the device")
        if name == "pin_memory":
            result = tensors[0].clone()
            self._keep(result, self._pinned)
        else:
            result = func(*args, **kwargs)
        if tensors:
            is_host = all(map(self._host, tensors))
        else:
            is_host = name in _MAKING and kwargs.get("device") is None
            if name in _MAKING[:2] and not is_host:
                self.note("a value of the host's")
        if is_host:
            for tensor in self._tensors(result):
                self._keep(tensor, self._of_host)
        return result

    def _keep(self, tensor: Tensor, storages: set[int]) -> None:
        storage = tensor.untyped_storage()
        self._kept.append(storage)  # keeps its address from being used again
        storages.add(storage.data_ptr())

    def _host(self, tensor: Tensor) -> bool:
        return self._is(tensor, self._of_host)

    @staticmethod
    def _is(tensor: Tensor, storages: set[int]) -> bool:
        try:
            return tensor.untyped_storage().data_ptr() in storages
        except (RuntimeError, NotImplementedError):  # DTensors and tensors without values
            return False

    @staticmethod
    def _names_device(args: Any, kwargs: Any) -> bool:
        named = any(isinstance(value, torch.device | str) for value in args[1:])
        return named or kwargs.get("device") is not None

    @staticmethod
    def _tensors(result: object) -> Iterator[Tensor]:
        yield from (x for x in tree_leaves(result) if isinstance(x, Tensor))


class _Dispatched(TorchDispatchMode):
    """Sees the operations that torch calls itself."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        masks = "aten.index" in str(func) and any(
            isinstance(x, Tensor) and x.dtype is torch.bool for x in tree_leaves(args[1])
        )
        if masks or any(word in str(func) for word in _ASKING):
            self._waits.note(str(func))
        return func(*args, **(kwargs or {}))
