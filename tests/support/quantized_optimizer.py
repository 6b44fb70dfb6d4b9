"""Adam with 8-bit moments of large parameters, one scale per block, as in bitsandbytes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BLOCK = 256
"""Number of elements that share a scale."""
LARGE = 4096
"""Minimum number of elements of a parameter with quantized moments."""


class Adam8bit(Optimizer):
    """Stores ``m`` and ``v`` as uint8 with a scale per block, or as fp32 for small parameters."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad.float(), group["lr"])

    def _update(self, p: Tensor, gradient: Tensor, lr: float) -> None:
        state = self.state[p]
        if not state:
            state["step"] = 0
            for name in ("m", "v"):
                self._keep(state, name, torch.zeros_like(p, dtype=torch.float32))
        state["step"] += 1
        m = self._kept(state, "m").lerp_(gradient, 0.1)
        v = self._kept(state, "v").lerp_(gradient.square(), 0.01)
        p.sub_((lr * m / (v.sqrt() + 1e-8)).to(p.dtype))
        self._keep(state, "m", m)
        self._keep(state, "v", v)

    def _keep(self, state: dict[str, Any], name: str, value: Tensor) -> None:
        if value.numel() < LARGE:
            state[name] = value
            return
        blocks = torch.zeros(math.ceil(value.numel() / BLOCK), BLOCK)
        blocks.view(-1)[: value.numel()] = value.flatten()
        scale = blocks.abs().amax(1)
        codes = blocks / scale.clamp(min=1e-30)[:, None] * 127 + 128
        state[name] = codes.round().to(torch.uint8).view(-1)[: value.numel()].view(value.shape)
        state[f"absmax_{name}"] = scale
        state[f"table_{name}"] = torch.linspace(-128 / 127, 1, 256)

    def _kept(self, state: dict[str, Any], name: str) -> Tensor:
        kept: Tensor = state[name]
        if kept.dtype != torch.uint8:
            return kept.clone()
        scale = state[f"absmax_{name}"].repeat_interleave(BLOCK)[: kept.numel()].view(kept.shape)
        value: Tensor = state[f"table_{name}"][kept.long()] * scale
        return value


class Subclass(Tensor):
    pass


class AdamOfSubclass(Adam8bit):
    """Stores its moments in a tensor subclass."""

    def _keep(self, state: dict[str, Any], name: str, value: Tensor) -> None:
        state[name] = value.as_subclass(Subclass) if value.numel() >= LARGE else value


class Fp32Adam(Adam8bit):
    """Stores its moments in fp32, whatever the dtype of the weights."""

    def _keep(self, state: dict[str, Any], name: str, value: Tensor) -> None:
        state[name] = value
