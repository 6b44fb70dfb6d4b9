"""GPT: a decoder with learned positions, LayerNorm, GELU and tied embeddings.

Plain single-device code. On a pipeline stage, missing parts are ``None``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonlaunch.config.options.model import GPTConfig
from axonlaunch.models.modules.attention import Attention, Packing
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import ModelSpec, takes_positions
from axonlaunch.models.tensors.initialization import transformer_initializers


class FeedForward(nn.Module):
    """Linear layer, GELU, linear layer."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate
        self.up_proj = nn.Linear(hidden_size, intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden]."""
        hidden = F.gelu(self.up_proj(x), approximate=self.approximate)
        output: Tensor = self.down_proj(hidden)
        return output


class GPTBlock(nn.Module):
    """Attention and feed-forward, each with a preceding LayerNorm and a residual connection."""

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        intermediate_size: int,
        layer_norm_eps: float,
        causal: bool,
        approximate: str = "none",  # the exact GELU, because tanh takes twice as long on a CPU
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.self_attn = Attention(hidden_size, num_heads=num_heads, bias=True, causal=causal)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.mlp = FeedForward(hidden_size, intermediate_size, approximate=approximate)

    def forward(self, x: Tensor, packing: Packing | None = None) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), packing=packing)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class GPT(nn.Module):
    """Language model that returns logits of the next token at every position.

    On a pipeline stage, missing parts are None: the embeddings, entries of ``layers`` (the other
    entries keep their numbers and names), ``norm`` and ``lm_head``.
    """

    embed_tokens: nn.Embedding | None
    embed_positions: nn.Embedding | None
    norm: nn.LayerNorm | None
    lm_head: nn.Linear | None
    find_documents: Callable[[Tensor | None], Packing | None] = staticmethod(Packing.of)
    """Finds the documents in rows; engines that split sequences replace this function."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, size)
        self.layers = nn.ModuleList(
            GPTBlock(
                size,
                num_heads=config.num_attention_heads,
                intermediate_size=config.intermediate_size or 4 * size,
                layer_norm_eps=config.layer_norm_eps,
                causal=True,
                approximate="tanh" if config.activation_function == "gelu_new" else "none",
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map tokens, or hidden states on later stages, to logits [B, T, vocab_size].

        Args:
            x: Tokens [B, T] int64, or hidden states [B, T, hidden].
            positions: Position of each token in its document [B, T] int64, if rows hold several
                documents. They select rows of the position embedding. None means 0 to T - 1.
        """
        packing = self.find_documents(positions)
        if self.embed_tokens is not None and self.embed_positions is not None:
            if positions is None:
                positions = torch.arange(x.shape[1], device=x.device)
            x = self.embed_tokens(x) + self.embed_positions(positions)
        for layer in self.layers:
            if layer is not None:
                x = layer(x, packing)
        if self.norm is not None and self.lm_head is not None:
            x = self.lm_head(self.norm(x))
        return x


BLOCKS_PLAN = {
    "layers.*.self_attn": "region",
    "layers.*.self_attn.[qkv]_proj": "column",
    "layers.*.self_attn.o_proj": "row",
    "layers.*.mlp": "region",
    "layers.*.mlp.up_proj": "column",
    "layers.*.mlp.down_proj": "row",
}

SPEC = ModelSpec(
    build=GPT,
    loss=cross_entropy_sum,
    layers="layers",
    ends=(("embed_tokens", "embed_positions"), ("norm", "lm_head")),
    positions=("embed_positions",),
    unpackable=takes_positions,
    shards_documents=True,
    inputs="tokens",
    head="lm_head",
    initializers=transformer_initializers,
    tensor_plan={
        "embed_tokens": "vocabulary",
        "embed_positions": "sequence",
        "layers.*_layernorm": "sequence",
        **BLOCKS_PLAN,
        "norm": "sequence",
        "lm_head": "vocabulary",
    },
    sequence_parallel=True,
)
