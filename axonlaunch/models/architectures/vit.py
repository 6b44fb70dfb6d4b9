"""ViT: a transformer over an image's patches, with learned positions and mean pooling.

Plain single-device code. On a pipeline stage, missing parts are ``None``. Mean pooling instead of a
class token follows Beyer et al., Better plain ViT baselines (2022).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from axonlaunch.config.options.model import ViTConfig
from axonlaunch.models.architectures.gpt import BLOCKS_PLAN, GPTBlock
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.models.tensors.initialization import transformer_initializers


class ViT(nn.Module):
    """Image classifier that returns logits."""

    embed_patches: nn.Conv2d | None
    embed_positions: nn.Embedding | None
    norm: nn.LayerNorm | None
    head: nn.Linear | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        size, patch = config.hidden_size, config.patch_size
        self.embed_patches = nn.Conv2d(config.num_channels, size, kernel_size=patch, stride=patch)
        self.embed_positions = nn.Embedding((config.image_size // patch) ** 2, size)
        self.layers = nn.ModuleList(
            GPTBlock(
                size,
                num_heads=config.num_attention_heads,
                intermediate_size=config.intermediate_size or 4 * size,
                layer_norm_eps=config.layer_norm_eps,
                causal=False,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.head = nn.Linear(size, config.num_classes)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] (on later stages: hidden states) to logits [B, classes]."""
        if self.embed_patches is not None and self.embed_positions is not None:
            x = self.embed_patches(x).flatten(2).transpose(1, 2)
            x = x + self.embed_positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            if layer is not None:
                x = layer(x)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.head is None else self.head(x.mean(1))


SPEC = ModelSpec(
    build=ViT,
    loss=cross_entropy_sum,
    layers="layers",
    ends=(("embed_patches", "embed_positions"), ("norm", "head")),
    inputs="images",
    initializers=transformer_initializers,
    tensor_plan=BLOCKS_PLAN,
)
