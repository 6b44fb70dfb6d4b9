"""Simulates a GPU on the CPU that refuses to compute with tensors of another device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

_CPU = torch.device("cpu")
_ANYWHERE = ("copy_", "__get__", "__set__", "_has_compatible_shallow_copy_type")


class PretendGpu(TorchFunctionMode):
    """Tracks tensors that were moved to ``cuda``, and the tensors computed from them.

    Modules are moved by ``module.to``, tensors by ``to``, ``cpu`` and ``copy_``.

    Attributes:
        computed: Operations on its tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.computed: set[str] = set()
        self._kept: list[Any] = []
        self._here: set[int] = set()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._here

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        targets = [d for d in map(_device, tree_leaves((args[1:], kwargs))) if d is not None]
        like = tensors[1:] if name == "to" else []
        if name in ("to", "cpu") and (targets or like or name == "cpu"):
            on_gpu = targets[0].type == "cuda" if targets else any(map(self.holds, like))
            args, kwargs = tree_map(_on_cpu, (args, kwargs))
            moved: Tensor = func(*args, **kwargs)
            if on_gpu != self.holds(tensors[0]):
                moved = moved.detach().clone().requires_grad_(moved.requires_grad)
            return self._keep(moved) if on_gpu else moved
        places = {self.holds(tensor) for tensor in tensors if tensor.ndim}
        if len(places) > 1 and name not in _ANYWHERE:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        result = func(*args, **kwargs)
        if name in ("copy_", "__set__"):
            return result
        if any(map(self.holds, tensors)):  # includes gradients that are read
            self.computed.add(name)
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._keep(leaf)
        return result

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._kept.append(storage)  # keeps its address from being used again
        self._here.add(storage.data_ptr())
        return tensor


def _device(value: object) -> torch.device | None:
    if isinstance(value, torch.device):
        return value
    return torch.device(value) if isinstance(value, str) and value[:4] in ("cpu", "cuda") else None


def _on_cpu(value: Any) -> Any:
    return _CPU if _device(value) is not None else value
