"""Typed configurations of models, under the names that Hugging Face gives the same figures.

It holds values and what fits together among them; ``axonlaunch.models`` builds from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from axonlaunch.config.errors import divisor_of, target_problems
from axonlaunch.config.registry import Entry, Needs, Registry

MOST_LAYERS = 10_000
"""Each is a module that is built before anything can be said of the model, on ``meta`` too."""


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Linear layers with ReLU between them, on flattened inputs."""

    name: str = "mlp"
    """name in the registry of models"""
    input_size: int = field(default=784, metadata={"min": 1})
    """numbers in one flattened sample: channels x height x width of an image"""
    hidden_size: int = field(default=256, metadata={"min": 1})
    """width of each hidden layer"""
    num_hidden_layers: int = field(default=1, metadata={"min": 1, "max": MOST_LAYERS})
    """hidden layers"""
    num_classes: int = field(default=10, metadata={"min": 1})
    """number of classes"""
    weights: str | None = None
    """start from these: a run, a checkpoint, or a folder of safetensors; null: from the seed"""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A GPT-2 shaped decoder: learned positions, LayerNorm, GELU, tied embeddings."""

    name: str = "gpt"
    """name in the registry of models"""
    hidden_size: int = field(default=128, metadata={"min": 1})
    """width of the residual stream"""
    num_hidden_layers: int = field(default=4, metadata={"min": 1, "max": MOST_LAYERS})
    """blocks of attention and feed-forward"""
    num_attention_heads: int = field(default=4, metadata={"min": 1})
    """heads of each attention; divides hidden_size"""
    intermediate_size: int | None = field(default=None, metadata={"min": 1})
    """width inside the feed-forward; null: 4 x hidden_size"""
    vocab_size: int = field(default=256, metadata={"min": 1})
    """tokens that the model knows; 256 are all bytes"""
    max_position_embeddings: int = field(default=1024, metadata={"min": 1})
    """longest sequence"""
    activation_function: Literal["gelu", "gelu_new"] = "gelu"
    """between the linear layers; gelu_new is GPT-2's own, with a tanh"""
    layer_norm_eps: float = field(default=1e-5, metadata={"above": 0})
    """added to the variance inside LayerNorm"""
    initializer_range: float | None = field(default=None, metadata={"above": 0})
    """standard deviation of the initial weights; null: sqrt(0.4 / hidden_size)"""
    tie_word_embeddings: bool = True
    """use the embedding's matrix as the output projection too"""
    weights: str | None = None
    """start from these: a run, a checkpoint, or a folder of safetensors; null: from the seed"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
        return _head_problems(self.hidden_size, self.num_attention_heads)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """A Llama 3 shaped decoder: RoPE, RMSNorm, SwiGLU, grouped-query attention."""

    name: str = "llama"
    """name in the registry of models"""
    hidden_size: int = field(default=128, metadata={"min": 1})
    """width of the residual stream"""
    num_hidden_layers: int = field(default=4, metadata={"min": 1, "max": MOST_LAYERS})
    """blocks of attention and feed-forward"""
    num_attention_heads: int = field(default=8, metadata={"min": 1})
    """query heads of each attention; divides hidden_size"""
    num_key_value_heads: int | None = field(default=4, metadata={"min": 1})
    """heads of keys and values, each shared by a group of query heads; null: one a query head"""
    intermediate_size: int = field(default=384, metadata={"min": 1})
    """width inside the feed-forward"""
    vocab_size: int = field(default=256, metadata={"min": 1})
    """tokens that the model knows; 256 are all bytes"""
    max_position_embeddings: int = field(default=1024, metadata={"min": 1})
    """longest sequence"""
    rope_theta: float = field(default=500_000.0, metadata={"above": 0})
    """base of the rotary embedding's wavelengths"""
    rms_norm_eps: float = field(default=1e-5, metadata={"above": 0})
    """added to the mean square inside RMSNorm"""
    initializer_range: float | None = field(default=None, metadata={"above": 0})
    """standard deviation of the initial weights; null: sqrt(0.4 / hidden_size)"""
    tie_word_embeddings: bool = False
    """use the embedding's matrix as the output projection too"""
    weights: str | None = None
    """start from these: a run, a checkpoint, or a folder of safetensors; null: from the seed"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
        heads = self.num_attention_heads
        if problems := _head_problems(self.hidden_size, heads):
            return problems
        if (self.hidden_size // heads) % 2:
            message = (
                f"hidden_size={self.hidden_size} makes heads of {self.hidden_size // heads} "
                "numbers, and rotary positions need an even number; change either"
            )
            return [("num_attention_heads", message)]
        groups = self.num_key_value_heads
        if groups and heads % groups:
            message = f"num_attention_heads={heads} is not divisible by it; use {divisor_of(heads)}"
            return [("num_key_value_heads", message)]
        return []


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """A vision transformer: patches, learned positions, mean pooling."""

    name: str = "vit"
    """name in the registry of models"""
    image_size: int = field(default=28, metadata={"min": 1})
    """height and width of an image, pixels"""
    patch_size: int = field(default=4, metadata={"min": 1})
    """height and width of a patch, pixels; divides image_size"""
    num_channels: int = field(default=1, metadata={"min": 1})
    """channels of an image: 1 grey, 3 colour"""
    num_classes: int = field(default=10, metadata={"min": 1})
    """number of classes"""
    hidden_size: int = field(default=64, metadata={"min": 1})
    """width of the residual stream"""
    num_hidden_layers: int = field(default=4, metadata={"min": 1, "max": MOST_LAYERS})
    """blocks of attention and feed-forward"""
    num_attention_heads: int = field(default=4, metadata={"min": 1})
    """heads of each attention; divides hidden_size"""
    intermediate_size: int | None = field(default=None, metadata={"min": 1})
    """width inside the feed-forward; null: 4 x hidden_size"""
    layer_norm_eps: float = field(default=1e-6, metadata={"above": 0})
    """added to the variance inside LayerNorm"""
    initializer_range: float | None = field(default=None, metadata={"above": 0})
    """standard deviation of the initial weights; null: sqrt(0.4 / hidden_size)"""
    weights: str | None = None
    """start from these: a run, a checkpoint, or a folder of safetensors; null: from the seed"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
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
    """A user's own builder, named by where it is imported from."""

    name: str = "custom"
    """name in the registry of models"""
    target: str
    """what builds the module, package.module:build; called with the arguments"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the builder"""
    layers: str | None = None
    """path of the nn.ModuleList of blocks in the module, the unit of sharding; null: one unit"""
    weights: str | None = None
    """start from these: a run, a checkpoint, or a folder of safetensors; null: from the seed"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
        return target_problems(self.target, "build")


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """A causal language model of the installed transformers."""

    name: str = "hf"
    """name in the registry of models"""
    path: str | None = None
    """folder with a config.json, or a model id on the Hugging Face Hub; null: model.config alone"""
    init: Literal["pretrained", "random"] = "pretrained"
    """initial weights: those of model.path, or random ones from the seed"""
    config: dict[str, Any] = field(default_factory=dict)
    """overrides of keys in config.json, nested; without a path it needs model_type"""
    attention: Literal["auto", "sdpa", "flex", "eager"] = "auto"
    """implementation of attention; auto: what transformers chooses"""
    revision: str | None = None
    """branch, tag or commit of a model id; null: its main branch"""
    trust_remote_code: bool = False
    """run Python code that comes with the model"""
    weights: str | None = None
    """start from these: a run, a checkpoint, or a folder of safetensors; null: as init says"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
        if self.path is None and "model_type" not in self.config:
            message = "is missing; write a folder or a model id, or model.config={model_type: ...}"
            return [("path", message)]
        if self.path == "":
            return [("path", "is empty; write a folder or a model id, or null")]
        if self.path is None and self.init == "pretrained" and self.weights is None:
            return [("init", "model.path names no weights to read; use random, or set model.path")]
        if self.path is None and self.revision is not None:
            return [("revision", "is of a model id, and model.path is null; remove this setting")]
        return []


@dataclass(frozen=True, kw_only=True)
class FreeModelConfig:
    """Configuration of a registered model that brought no dataclass of its own."""

    name: str
    """name in the registry of models"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the model"""
    weights: str | None = None
    """start from these: a run, a checkpoint, or a folder of safetensors; null: from the seed"""


def _head_problems(hidden_size: int, num_attention_heads: int) -> list[tuple[str, str]]:
    if hidden_size % num_attention_heads == 0:
        return []
    message = f"hidden_size={hidden_size} is not divisible by it; use {divisor_of(hidden_size)}"
    return [("num_attention_heads", message)]


OWN_MODEL_CONFIGS = (MLPConfig, GPTConfig, LlamaConfig, ViTConfig)
"""Of the models whose code is here: what they are fed and return follows from their figures."""

MODELS: Registry[Any, None] = Registry(
    "model",
    {
        "mlp": Entry(
            "axonlaunch.models.mlp:SPEC", "linear layers with ReLU, for images", MLPConfig
        ),
        "gpt": Entry(
            "axonlaunch.models.gpt:SPEC", "decoder with learned positions, as GPT-2", GPTConfig
        ),
        "llama": Entry(
            "axonlaunch.models.llama:SPEC", "decoder with RoPE and GQA, as Llama 3", LlamaConfig
        ),
        "vit": Entry("axonlaunch.models.vit:SPEC", "vision transformer, for images", ViTConfig),
        "hf": Entry(
            "axonlaunch.models.hf.spec:SPEC",
            "any causal LM of transformers, model.path",
            HuggingFaceConfig,
            needs=Needs("transformers", "transformers", "axonlaunch[hf]"),
        ),
        "custom": Entry(
            "axonlaunch.models.custom:SPEC", "your own builder, model.target", CustomConfig
        ),
    },
    entry_points="axonlaunch.models",
    free_config=FreeModelConfig,
)
"""Each stands for a ``ModelSpec``, in which is all that others must know of a model."""
