"""Reads and restores the state of a module: modes, persistent buffers, tensors by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def evaluating(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode, then restore the mode of each submodule.

    ``train()`` can't restore the modes: it would also enable a BatchNorm with statistics that the
    model froze.
    """
    submodules = [submodule for module in modules for submodule in module.modules()]
    modes = [submodule.training for submodule in submodules]
    for submodule in submodules:
        submodule.training = False
    try:
        yield
    finally:
        for submodule, mode in zip(submodules, modes, strict=True):
            submodule.training = mode


def persistent_buffers(model: torch.nn.Module) -> list[str]:
    """Return the names of persistent buffers; a model may replace their tensors."""
    state = model.state_dict()
    return [name for name, _ in model.named_buffers() if name in state]


def model_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; tied parameters appear once."""
    state = model.state_dict()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in tensors if name in state}
