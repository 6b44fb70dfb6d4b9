"""MLP: linear layers with ReLU between them, on flattened inputs.

Plain single-device code. On a pipeline stage, missing parts are ``None``.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from axonlaunch.config.options.model import MLPConfig
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.models.tensors.initialization import Initializer, Uniform


class MLP(nn.Module):
    """Image classifier that returns logits."""

    head: nn.Linear | None

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        sizes = [config.input_size] + [config.hidden_size] * config.num_hidden_layers
        self.layers = nn.ModuleList(nn.Linear(width, config.hidden_size) for width in sizes[:-1])
        self.head = nn.Linear(config.hidden_size, config.num_classes)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, ...] (on later stages: hidden states) to logits [B, classes]."""
        x = x.flatten(1)
        for layer in self.layers:
            if layer is not None:
                x = F.relu(layer(x))
        return x if self.head is None else self.head(x)


def _initializers(module: nn.Module) -> dict[str, Initializer]:
    # The default of nn.Linear: uniform within 1 / sqrt(inputs).
    return {
        f"{name}.{kind}": Uniform(1 / math.sqrt(linear.in_features))
        for name, linear in module.named_modules()
        if isinstance(linear, nn.Linear)
        for kind in ("weight", "bias")
    }


def _tensor_plan(module: nn.Module) -> dict[str, str]:
    # Layers are paired by their index in the whole model, so that all pipeline stages agree.
    config: Any = module.config
    names = [f"layers.{index}" for index in range(config.num_hidden_layers)] + ["head"]
    plan: dict[str, str] = {}
    for wide, narrow in zip(names[::2], names[1::2], strict=False):
        plan |= {wide: "column", narrow: "row"}
    return plan


SPEC = ModelSpec(
    build=MLP,
    loss=cross_entropy_sum,
    layers="layers",
    ends=((), ("head",)),
    inputs="images",
    initializers=_initializers,
    tensor_plan=_tensor_plan,
)
