"""Models to divide, and the references for their training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import axonlaunch as ax
from axonlaunch.config.options.model import GPTConfig, LlamaConfig, ViTConfig
from axonlaunch.engines.tensor.parallelize import sharded_classes
from axonlaunch.models.build import build_model
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.tensors import dtensor_regions
from axonlaunch.models.tensors.initialization import reset_buffers

VOCABULARY = 60
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "initializer_range": 0.3,
}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=4, intermediate_size=48)
TIED_LLAMA = LlamaConfig(**SIZES, intermediate_size=48, tie_word_embeddings=True)
GPT = GPTConfig(**SIZES)
VIT = ViTConfig(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4
)


def on_ranks(size: int, fn: Callable[[ax.World], Any]) -> list[Any]:
    return ax.World.mock(size).run(fn)


def axis(world: ax.World) -> DeviceMesh:
    return init_device_mesh("cpu", (world.world_size,), mesh_dim_names=("tp",))


def tokens_and_targets() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(3))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    return tokens, targets


def full(value: Tensor | None) -> Tensor:
    assert isinstance(value, DTensor)
    return dtensor_regions.full_tensor(value)  # torch 2.11 can't redistribute packed values


def loss_of(model: nn.Module, mesh: DeviceMesh, inputs: Tensor, targets: Tensor) -> Tensor:
    if (classes := sharded_classes(model)) is None:
        return cross_entropy_sum(model(inputs), targets)
    group = ax.ProcessGroup.from_torch(mesh.get_group())
    return ax.vocab_parallel_cross_entropy_sum(model(inputs), targets, group=group, classes=classes)


def assert_same_gradients(divided: nn.Module, undivided: nn.Module, **tolerance: float) -> None:
    for (name, got), (expected_name, expected) in zip(
        divided.named_parameters(), undivided.named_parameters(), strict=True
    ):
        assert name == expected_name
        assert got.shape == expected.shape
        try:
            torch.testing.assert_close(full(got.grad), expected.grad, **tolerance)
        except AssertionError as difference:
            raise AssertionError(f"the gradient of {name}: {difference}") from None


def in_float64(config: Any) -> nn.Module:
    module = build_model(config, seed=1).double()
    reset_buffers(module)
    return module


class Seen(TorchDispatchMode):
    """Counts collectives, and tensors with a dimension of some size."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim, self.tensors = dim, 0
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func.namespace == "_c10d_functional" and "wait" not in func.name():
            self.names.append(func.name().partition("::")[2].rstrip("_"))
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            plain = isinstance(tensor, Tensor) and not isinstance(tensor, DTensor)
            self.tensors += plain and self.dim in tensor.shape
        return out
