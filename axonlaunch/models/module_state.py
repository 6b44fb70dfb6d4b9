"""A module's own state: its mode, its persistent buffers, its tensors by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def evaluating(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode, and after that each part into the mode that it had.

    ``train()`` would not do: it also wakes a BatchNorm whose statistics the model froze.
    """
    submodules = [part for module in modules for part in module.modules()]
    modes = [part.training for part in submodules]
    for part in submodules:
        part.training = False
    try:
        yield
    finally:
        for part, mode in zip(submodules, modes, strict=True):
            part.training = mode


def persistent_buffers(model: torch.nn.Module) -> list[str]:
    """Return the names of buffers that belong to a model's state; a model may replace a tensor."""
    state = model.state_dict()
    return [name for name, _ in model.named_buffers() if name in state]


def model_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, a tied parameter once."""
    state = model.state_dict()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if name in state}
