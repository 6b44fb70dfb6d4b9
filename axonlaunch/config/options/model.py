"""Typed configurations of models, and the registry of models.

Sizes have the names that Hugging Face uses. ``axonlaunch.models`` builds the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from axonlaunch.config.problems.errors import divisor_of, target_problems
from axonlaunch.config.registry import Entry, Needs, RegisteredConfig, Registry

MOST_LAYERS = 10_000
"""Largest number of layers; every layer is built, on ``meta`` at least, before any estimate."""
_FLASH_IN_TORCH = (
    "FlashAttention is used as a kernel of torch; use auto, with train.attention_kernel=flash to "
    "allow no other kernel"
)
_NO_FLASH_4 = (
    "kernels of FlashAttention 4 are not offered, because they were not compared with those of "
    "torch; use auto or flex"
)
_FLASH_KERNELS = {
    **dict.fromkeys(("flash", "flash2", "flash_attention_2", "flash_attention_3"), _FLASH_IN_TORCH),
    **dict.fromkeys(("fa4", "flash4", "flash_attention_4"), _NO_FLASH_4),
}
"""Reasons by the names that other tools have for kernels of FlashAttention."""


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Linear layers with ReLU between them, on flattened inputs."""

    name: str = "mlp"
    """name of the model"""
    input_size: int = field(default=784, metadata={"min": 1})
    """size of one flattened sample: channels x height x width of an image"""
    hidden_size: int = field(default=256, metadata={"min": 1})
    """width of each hidden layer"""
    num_hidden_layers: int = field(default=1, metadata={"min": 1, "max": MOST_LAYERS})
    """number of hidden layers"""
    num_classes: int = field(default=10, metadata={"min": 1})
    """number of classes"""
    weights: str | None = None
    """initial weights: a run, checkpoint or safetensors folder; null: random, from the seed"""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Decoder like GPT-2: learned positions, LayerNorm, GELU, tied embeddings."""

    name: str = "gpt"
    """name of the model"""
    hidden_size: int = field(default=128, metadata={"min": 1})
    """width of the residual stream"""
    num_hidden_layers: int = field(default=4, metadata={"min": 1, "max": MOST_LAYERS})
    """number of blocks, each with attention and feed-forward"""
    num_attention_heads: int = field(default=4, metadata={"min": 1})
    """number of attention heads per block; must divide hidden_size"""
    intermediate_size: int | None = field(default=None, metadata={"min": 1})
    """width of the feed-forward layers; null: 4 x hidden_size"""
    vocab_size: int = field(default=256, metadata={"min": 1})
    """size of the vocabulary; 256 covers all bytes"""
    max_position_embeddings: int = field(default=1024, metadata={"min": 1})
    """length of the longest sequence, tokens"""
    activation_function: Literal["gelu", "gelu_new"] = "gelu"
    """activation between the feed-forward layers; gelu_new is the tanh approximation of GPT-2"""
    layer_norm_eps: float = field(default=1e-5, metadata={"above": 0})
    """term added to the variance in LayerNorm"""
    initializer_range: float | None = field(default=None, metadata={"above": 0})
    """standard deviation of the initial weights; null: sqrt(0.4 / hidden_size)"""
    tie_word_embeddings: bool = True
    """use the embedding matrix as the output projection too"""
    weights: str | None = None
    """initial weights: a run, checkpoint or safetensors folder; null: random, from the seed"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid combination of values."""
        return _head_problems(self.hidden_size, self.num_attention_heads)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Decoder like Llama 3: RoPE, RMSNorm, SwiGLU, grouped-query attention."""

    name: str = "llama"
    """name of the model"""
    hidden_size: int = field(default=128, metadata={"min": 1})
    """width of the residual stream"""
    num_hidden_layers: int = field(default=4, metadata={"min": 1, "max": MOST_LAYERS})
    """number of blocks, each with attention and feed-forward"""
    num_attention_heads: int = field(default=8, metadata={"min": 1})
    """number of query heads per block; must divide hidden_size"""
    num_key_value_heads: int | None = field(default=4, metadata={"min": 1})
    """number of key-value heads, each shared by a group of query heads; null: one per query head"""
    intermediate_size: int = field(default=384, metadata={"min": 1})
    """width of the feed-forward layers"""
    vocab_size: int = field(default=256, metadata={"min": 1})
    """size of the vocabulary; 256 covers all bytes"""
    max_position_embeddings: int = field(default=1024, metadata={"min": 1})
    """length of the longest sequence, tokens"""
    rope_theta: float = field(default=500_000.0, metadata={"above": 0})
    """base of the wavelengths of rotary embeddings"""
    rms_norm_eps: float = field(default=1e-5, metadata={"above": 0})
    """term added to the mean square in RMSNorm"""
    initializer_range: float | None = field(default=None, metadata={"above": 0})
    """standard deviation of the initial weights; null: sqrt(0.4 / hidden_size)"""
    tie_word_embeddings: bool = False
    """use the embedding matrix as the output projection too"""
    weights: str | None = None
    """initial weights: a run, checkpoint or safetensors folder; null: random, from the seed"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid combination of values."""
        heads = self.num_attention_heads
        if problems := _head_problems(self.hidden_size, heads):
            return problems
        if (self.hidden_size // heads) % 2:
            message = (
                f"hidden_size={self.hidden_size} makes heads of {self.hidden_size // heads} "
                "numbers, and rotary positions need an even number; change either"
            )
            return [("num_attention_heads", message)]
        return self.head_group_problems()

    def head_group_problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` if query heads can't share the key-value heads equally."""
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if groups and heads % groups:
            message = f"num_attention_heads={heads} is not divisible by it; use {divisor_of(heads)}"
            return [("num_key_value_heads", message)]
        return []


@dataclass(frozen=True, kw_only=True)
class MoEConfig(LlamaConfig):
    """Mixture of experts in Llama's blocks: each token is computed by a few of many experts."""

    name: str = "moe"
    """name of the model"""
    num_hidden_layers: int = field(default=4, metadata={"min": 1, "max": MOST_LAYERS})
    """number of blocks, each with attention and experts, or a feed-forward in the first ones"""
    num_attention_heads: int = field(default=8, metadata={"min": 1})
    """number of query heads per block; must divide hidden_size if head_dim is null"""
    head_dim: int | None = field(default=None, metadata={"min": 2})
    """size of an attention head, an even number; null: hidden_size / num_attention_heads"""
    intermediate_size: int = field(default=384, metadata={"min": 1})
    """width of the feed-forward in the first first_k_dense_replace blocks, which have no experts"""
    qk_norm: bool = False
    """normalize the queries and keys of each head, as Qwen3 does"""
    num_experts: int = field(default=8, metadata={"min": 1, "max": MOST_LAYERS})
    """number of routed experts per block"""
    num_experts_per_tok: int = field(default=2, metadata={"min": 1})
    """number of routed experts that compute each token"""
    moe_intermediate_size: int = field(default=128, metadata={"min": 8})
    """width of an expert; a multiple of 8"""
    n_shared_experts: int = field(default=1, metadata={"min": 0})
    """number of experts that compute every token; 0: none"""
    first_k_dense_replace: int = field(default=0, metadata={"min": 0})
    """number of blocks at the start with a feed-forward of intermediate_size instead of experts"""
    scoring_func: Literal["sigmoid", "softmax"] = "sigmoid"
    """scores of experts. sigmoid: as in DeepSeek-V3; softmax: as in Mixtral and Qwen3"""
    norm_topk_prob: bool = True
    """divide the weights of a token's experts by their sum"""
    routed_scaling_factor: float = field(default=1.0, metadata={"above": 0})
    """factor of the weights of a token's experts"""
    router_aux_loss: float | bool = field(default=False, metadata={"min": 0})
    """weight of the loss that balances the experts of the global batch; false: no loss"""
    balance: Literal["none", "bias"] = "none"
    """bias: each step moves the experts' biases towards equal loads, as in DeepSeek-V3"""
    balance_rate: float = field(default=1e-3, metadata={"above": 0})
    """step of these biases"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid combination of values."""
        if self.head_dim is None:
            if problems := super().problems():
                return problems
        elif self.head_dim % 2:
            return [("head_dim", "rotary positions need an even number")]
        elif problems := self.head_group_problems():
            return problems
        problems = []
        for name in ("hidden_size", "moe_intermediate_size"):
            if (value := getattr(self, name)) % 8:
                message = f"products of experts need a multiple of 8; use {value + -value % 8}"
                problems.append((name, message))
        if self.num_experts_per_tok > self.num_experts:
            message = f"there are only num_experts={self.num_experts}; use at most as many"
            problems.append(("num_experts_per_tok", message))
        if self.router_aux_loss is True:
            problems.append(("router_aux_loss", "names no weight; use a number such as 0.001"))
        if self.router_aux_loss and self.first_k_dense_replace >= self.num_hidden_layers:
            message = "no block has a router, because first_k_dense_replace covers all; use false"
            problems.append(("router_aux_loss", message))
        return [*problems, *_balance_problems(self)]


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Vision transformer: patches, learned positions, mean pooling."""

    name: str = "vit"
    """name of the model"""
    image_size: int = field(default=28, metadata={"min": 1})
    """height and width of an image, pixels"""
    patch_size: int = field(default=4, metadata={"min": 1})
    """height and width of a patch, pixels; must divide image_size"""
    num_channels: int = field(default=1, metadata={"min": 1})
    """number of channels of an image: 1 gray, 3 color"""
    num_classes: int = field(default=10, metadata={"min": 1})
    """number of classes"""
    hidden_size: int = field(default=64, metadata={"min": 1})
    """width of the residual stream"""
    num_hidden_layers: int = field(default=4, metadata={"min": 1, "max": MOST_LAYERS})
    """number of blocks, each with attention and feed-forward"""
    num_attention_heads: int = field(default=4, metadata={"min": 1})
    """number of attention heads per block; must divide hidden_size"""
    intermediate_size: int | None = field(default=None, metadata={"min": 1})
    """width of the feed-forward layers; null: 4 x hidden_size"""
    layer_norm_eps: float = field(default=1e-6, metadata={"above": 0})
    """term added to the variance in LayerNorm"""
    initializer_range: float | None = field(default=None, metadata={"above": 0})
    """standard deviation of the initial weights; null: sqrt(0.4 / hidden_size)"""
    weights: str | None = None
    """initial weights: a run, checkpoint or safetensors folder; null: random, from the seed"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid combination of values."""
        problems = _head_problems(self.hidden_size, self.num_attention_heads)
        if self.image_size % self.patch_size:
            message = (
                f"image_size={self.image_size} is not divisible by it; "
                f"use {divisor_of(self.image_size)}"
            )
            problems.append(("patch_size", message))
        return problems


@dataclass(frozen=True, kw_only=True)
class CustomConfig:
    """User-defined model builder, named by its import path."""

    name: str = "custom"
    """name of the model"""
    target: str
    """import path of the builder, package.module:build; it is called with the arguments"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the builder"""
    layers: str | None = None
    """path of the nn.ModuleList of blocks, which are sharded separately; null: one unit"""
    weights: str | None = None
    """initial weights: a run, checkpoint or safetensors folder; null: random, from the seed"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid combination of values."""
        return target_problems(self.target, "build")


@dataclass(frozen=True, kw_only=True)
class TransformersModel:
    """Keys of ``model=hf`` that determine the model's modules, but not its initial weights."""

    name: str = "hf"
    """name of the model"""
    path: str | None = None
    """folder with a config.json, or model id on the Hugging Face Hub; null: only model.config"""
    config: dict[str, Any] = field(default_factory=dict)
    """nested overrides of keys in config.json; model_type is required without a path"""
    attention: Literal["auto", "sdpa", "flex", "eager"] = field(
        default="auto", metadata={"refused": _FLASH_KERNELS}
    )
    """implementation of attention; auto: chosen by transformers"""
    revision: str | None = None
    """branch, tag or commit of the model id; null: the main branch"""
    trust_remote_code: bool = False
    """run Python code that is distributed with the model"""
    router_aux_loss: float | bool | None = field(default=None, metadata={"min": 0})
    """weight of the loss that balances experts; null: that of the model's config; false: no loss"""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig(TransformersModel):
    """Causal language model of the installed transformers package."""

    init: Literal["pretrained", "random"] = "pretrained"
    """initial weights. pretrained: those of model.path; random: from the seed"""
    weights: str | None = None
    """initial weights: a run, checkpoint or safetensors folder; null: set by init"""
    balance: Literal["none", "bias"] = "none"
    """bias: steps move each e_score_correction_bias of routers towards equal numbers of tokens"""
    balance_rate: float = field(default=1e-3, metadata={"above": 0})
    """step of these biases"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid combination of values."""
        if self.path is None and "model_type" not in self.config:
            message = "is missing; write a folder or a model id, or model.config={model_type: ...}"
            return [("path", message)]
        if self.path == "":
            return [("path", "is empty; write a folder or a model id, or null")]
        if self.path is None and self.init == "pretrained" and self.weights is None:
            return [("init", "model.path names no weights to read; use random, or set model.path")]
        if self.router_aux_loss is True:
            return [("router_aux_loss", "names no weight; use null for that of the model's config")]
        if self.path is None and self.revision is not None:
            return [
                ("revision", "applies to a model id, but model.path is null; remove this setting")
            ]
        return _balance_problems(self)


@dataclass(frozen=True, kw_only=True)
class FreeModelConfig(RegisteredConfig):
    """Configuration of a model that was registered without a dataclass."""

    weights: str | None = None
    """initial weights: a run, checkpoint or safetensors folder; null: random, from the seed"""


def _balance_problems(config: MoEConfig | HuggingFaceConfig) -> list[tuple[str, str]]:
    if config.balance == "bias" or config.balance_rate == type(config).balance_rate:
        return []
    return [("balance_rate", "is the step of biases, but model.balance is none; use bias there")]


def _head_problems(hidden_size: int, num_attention_heads: int) -> list[tuple[str, str]]:
    if hidden_size % num_attention_heads == 0:
        return []
    message = f"hidden_size={hidden_size} is not divisible by it; use {divisor_of(hidden_size)}"
    return [("num_attention_heads", message)]


INCLUDED_MODEL_CONFIGS = (MLPConfig, GPTConfig, LlamaConfig, MoEConfig, ViTConfig)
"""Included models; the shapes of their inputs and outputs follow from their configurations."""
LANGUAGE_MODELS = (TransformersModel.name, GPTConfig.name, LlamaConfig.name, MoEConfig.name)
"""Names of models known to train well in bf16. Only the authors of other models can know."""


def is_of_transformers(model: Mapping[str, Any]) -> bool:
    """Return whether plain values of the group ``model`` select a model of transformers."""
    return bool(model.get("name") == TransformersModel.name)


def has_initial_weights(model: Mapping[str, Any]) -> bool:
    """Return whether plain values of the group ``model`` name files of initial weights."""
    is_pretrained = model.get("init", HuggingFaceConfig.init) == "pretrained"
    has_path = is_of_transformers(model) and model.get("path") is not None
    return model.get("weights") is not None or (has_path and is_pretrained)


def title_of(model: Mapping[str, Any]) -> Any:
    """Return a short title for plain values of the group ``model``.

    It is the last part of the path of a model of transformers, the target of a custom model, or the
    name of another model.
    """
    name, path, target = model.get("name"), model.get("path"), model.get("target")
    if is_of_transformers(model) and isinstance(path, str):
        return path.rstrip("/").rpartition("/")[2]
    return target if name == CustomConfig.name and isinstance(target, str) else name


MODELS: Registry[Any, None] = Registry(
    "model",
    {
        "mlp": Entry(
            "axonlaunch.models.architectures.mlp:SPEC",
            "linear layers with ReLU, for images",
            MLPConfig,
        ),
        "gpt": Entry(
            "axonlaunch.models.architectures.gpt:SPEC",
            "decoder with learned positions, like GPT-2",
            GPTConfig,
        ),
        "llama": Entry(
            "axonlaunch.models.architectures.llama:SPEC",
            "decoder with RoPE and GQA, like Llama 3",
            LlamaConfig,
        ),
        "moe": Entry(
            "axonlaunch.models.architectures.moe:SPEC",
            "mixture of experts in Llama's blocks",
            MoEConfig,
        ),
        "vit": Entry(
            "axonlaunch.models.architectures.vit:SPEC", "vision transformer, for images", ViTConfig
        ),
        "hf": Entry(
            "axonlaunch.models.hf.model_spec:SPEC",
            "any causal LM of transformers, model.path",
            HuggingFaceConfig,
            needs=Needs("transformers", "transformers", "axonlaunch[hf]"),
        ),
        "custom": Entry(
            "axonlaunch.models.specs.custom:SPEC", "your builder, model.target", CustomConfig
        ),
    },
    entry_points="axonlaunch.models",
    free_config=FreeModelConfig,
)
"""Models by name. Each target is a ``ModelSpec`` with all facts that other packages need."""
