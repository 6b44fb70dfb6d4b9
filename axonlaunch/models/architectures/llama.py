"""Llama: a decoder with rotary positions, RMSNorm, SwiGLU and grouped-query attention.

Plain single-device code. Modules are named as in Hugging Face's ``LlamaForCausalLM``, without the
leading ``model.``. On a pipeline stage, missing parts are ``None``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from axonlaunch.config.options.model import LlamaConfig
from axonlaunch.models.modules.attention import Attention, Packing, RotaryTable
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import ModelSpec, takes_positions
from axonlaunch.models.tensors.initialization import transformer_initializers


class GatedFeedForward(nn.Module):
    """SwiGLU (Shazeer, GLU Variants Improve Transformer, 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden]."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each with a preceding RMSNorm and a residual connection."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        feed_forward: nn.Module | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
    ) -> None:
        """Create a block.

        Args:
            config: Sizes.
            feed_forward: Module from [B, T, hidden] to [B, T, hidden]; None: SwiGLU.
            head_dim: Size of an attention head; None: ``hidden_size / num_attention_heads``.
            qk_norm: Whether attention normalizes queries and keys.
        """
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Attention(
            size,
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=head_dim,
            qk_norm_eps=eps if qk_norm else None,
        )
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = feed_forward or GatedFeedForward(size, config.intermediate_size)

    def forward(self, x: Tensor, rotary: RotaryTable, packing: Packing | None = None) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, packing)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Llama(nn.Module):
    """Language model that returns logits of the next token at every position.

    On a pipeline stage, missing parts are None: ``embed_tokens``, entries of ``layers`` (the other
    entries keep their numbers and names), ``norm`` and ``lm_head``.
    """

    embed_tokens: nn.Embedding | None
    norm: nn.RMSNorm | None
    lm_head: nn.Linear | None
    find_documents: Callable[[Tensor | None], Packing | None] = staticmethod(Packing.of)
    """Finds the documents in rows; engines that split sequences replace this function."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        blocks = [self.build_block(number) for number in range(config.num_hidden_layers)]
        self.rotary = RotaryTable(
            blocks[0].self_attn.head_dim,
            max_positions=config.max_position_embeddings,
            theta=config.rope_theta,
        )
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def build_block(self, number: int) -> LlamaBlock:
        """Return the block with a number from 0."""
        del number
        return LlamaBlock(self.config)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map tokens [B, T] (on later stages: hidden states) to logits [B, T, vocab].

        Args:
            x: Tokens [B, T] int64, or hidden states [B, T, hidden].
            positions: Position of each token in its document [B, T] int64, if rows hold several
                documents. They determine the rotation angles. None means 0 to T - 1.
        """
        packing = self.find_documents(positions)
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for layer in self.layers:
            if layer is not None:
                x = layer(x, self.rotary, packing)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.lm_head is None else self.lm_head(x)


SPEC = ModelSpec(
    build=Llama,
    loss=cross_entropy_sum,
    layers="layers",
    ends=(("embed_tokens",), ("norm", "lm_head")),
    positions=("rotary",),
    unpackable=takes_positions,
    shards_documents=True,
    inputs="tokens",
    head="lm_head",
    initializers=transformer_initializers,
    tensor_plan={
        "embed_tokens": "vocabulary",
        "layers.*_layernorm": "sequence",
        "layers.*.self_attn": "region",
        "layers.*.self_attn.[qkv]_proj": "column",
        "layers.*.self_attn.o_proj": "row",
        "layers.*.mlp": "region",
        "layers.*.mlp.gate_proj": "column",
        "layers.*.mlp.up_proj": "column",
        "layers.*.mlp.down_proj": "row",
        "norm": "sequence",
        "lm_head": "vocabulary",
    },
    sequence_parallel=True,
)
