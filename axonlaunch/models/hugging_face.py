"""GPT and Llama in the names, shapes and figures of Hugging Face's GPT-2 and Llama.

It reads and writes no file. What ours does not compute as theirs does is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.config.model import GPTConfig, LlamaConfig
from axonlaunch.config.plain import to_tree
from axonlaunch.config.validate import validate


@dataclass(frozen=True)
class ParameterMapping:
    """Where a parameter of ours is among theirs.

    Attributes:
        name: Of their tensor.
        transposed: Whether theirs is [in, out], as in GPT-2's ``Conv1D``.
        part: Which of equal parts of their output dim it is.
        parts: How many those are.
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class _Format:
    """A model of theirs.

    Attributes:
        model_type: As ``config.json`` has it.
        places: Typed configuration to our parameters' places.
        figures: Typed configuration to the content of ``config.json``.
        read: The content of ``config.json`` to a typed configuration.
    """

    model_type: str
    places: Callable[[Any], Iterator[tuple[str, ParameterMapping]]]
    figures: Callable[[Any], dict[str, Any]]
    read: Callable[[Mapping[str, Any]], Any]


def places(config: Any) -> dict[str, ParameterMapping] | None:
    """Return where each parameter of ours is among theirs; None where they have no such model."""
    format_ = _FORMATS.get(config.name)
    return dict(format_.places(config)) if format_ else None


def config_content(config: Any) -> dict[str, Any]:
    """Return the content of ``config.json`` for a model that ``places`` knows."""
    format_ = _FORMATS[config.name]
    return {"model_type": format_.model_type, **format_.figures(config)}


def typed_model(content: Mapping[str, Any], *, where: str) -> GPTConfig | LlamaConfig:
    """Return the typed configuration of a model of theirs.

    Args:
        content: Of its ``config.json``.
        where: Its path, for messages.

    Raises:
        ConfigError: It is none that we have, or computes something that ours doesn't.
    """
    for candidate in _FORMATS.values():
        if candidate.model_type == content.get("model_type"):
            try:
                config: GPTConfig | LlamaConfig = candidate.read(content)
            except KeyError as error:
                raise ConfigError([ConfigIssue("", f"{where}: lacks {error}")]) from None
            except ValueError as error:
                message = f"{where}: {error}; {_any_model(where)}"
                raise ConfigError([ConfigIssue("", message)]) from None
            except (TypeError, AttributeError, ArithmeticError) as error:
                message = f"{where}: contains what is not a model's setting: {error}"
                raise ConfigError([ConfigIssue("", message)]) from None
            _refuse_wrong(config, where=where)
            return config
    known = " or ".join(sorted(candidate.model_type for candidate in _FORMATS.values()))
    kind = content.get("model_type")
    message = f"{where}: model_type={kind} can't be read; {_any_model(where)}, or {known}"
    raise ConfigError([ConfigIssue("", message)])


def _any_model(where: str) -> str:
    """Say what takes any causal language model of transformers as it is."""
    return f"use model=hf model.path={Path(where).parent}"


def _refuse_wrong(config: GPTConfig | LlamaConfig, *, where: str) -> None:
    """Hold figures that somebody wrote against what ours may be.

    Raises:
        ConfigError: Some can't be.
    """
    wrong = validate(to_tree(config), type(config)).problems
    if wrong:
        message = f"{where}: as a model of ours, {wrong[0]}"
        raise ConfigError([ConfigIssue("", message)])


def _gpt_places(config: GPTConfig) -> Iterator[tuple[str, ParameterMapping]]:
    yield "embed_tokens.weight", ParameterMapping("transformer.wte.weight")
    yield "embed_positions.weight", ParameterMapping("transformer.wpe.weight")
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
        for kind in ("weight", "bias"):
            turned = kind == "weight"
            yield f"{ours}.input_layernorm.{kind}", ParameterMapping(f"{theirs}.ln_1.{kind}")
            yield (
                f"{ours}.post_attention_layernorm.{kind}",
                ParameterMapping(f"{theirs}.ln_2.{kind}"),
            )
            for part, name in enumerate("qkv"):
                place = ParameterMapping(f"{theirs}.attn.c_attn.{kind}", turned, part, 3)
                yield f"{ours}.self_attn.{name}_proj.{kind}", place
            yield (
                f"{ours}.self_attn.o_proj.{kind}",
                ParameterMapping(f"{theirs}.attn.c_proj.{kind}", turned),
            )
            yield (
                f"{ours}.mlp.up_proj.{kind}",
                ParameterMapping(f"{theirs}.mlp.c_fc.{kind}", turned),
            )
            yield (
                f"{ours}.mlp.down_proj.{kind}",
                ParameterMapping(f"{theirs}.mlp.c_proj.{kind}", turned),
            )
    yield "norm.weight", ParameterMapping("transformer.ln_f.weight")
    yield "norm.bias", ParameterMapping("transformer.ln_f.bias")
    if not config.tie_word_embeddings:
        yield "lm_head.weight", ParameterMapping("lm_head.weight")


def _gpt_figures(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": config.activation_function,
        "n_embd": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "layer_norm_epsilon": config.layer_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _read_gpt(content: Mapping[str, Any]) -> GPTConfig:
    """Take GPT-2's figures; those that are left out are what its first version had."""
    _refuse(content, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    activation = content.get("activation_function", "gelu_new")
    if activation not in ("gelu", "gelu_new"):
        raise ValueError(f"activation_function={activation} is not supported; use gelu or gelu_new")
    return GPTConfig(
        hidden_size=content["n_embd"],
        num_hidden_layers=content["n_layer"],
        num_attention_heads=content["n_head"],
        intermediate_size=content.get("n_inner"),
        max_position_embeddings=content.get("n_positions", 1024),
        vocab_size=content["vocab_size"],
        layer_norm_eps=content.get("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=content.get("tie_word_embeddings", True),
        activation_function=activation,
    )


def _llama_places(config: LlamaConfig) -> Iterator[tuple[str, ParameterMapping]]:
    yield "embed_tokens.weight", ParameterMapping("model.embed_tokens.weight")
    for layer in range(config.num_hidden_layers):
        attention = [f"self_attn.{name}_proj" for name in "qkvo"]
        feed_forward = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        norms = ["input_layernorm", "post_attention_layernorm"]
        for name in (*norms, *attention, *feed_forward):
            ours = f"layers.{layer}.{name}.weight"
            yield ours, ParameterMapping(f"model.{ours}")
    yield "norm.weight", ParameterMapping("model.norm.weight")
    if not config.tie_word_embeddings:
        yield "lm_head.weight", ParameterMapping("lm_head.weight")


_LLAMA_FIGURES = tuple(
    field.name
    for field in fields(LlamaConfig)
    if field.name not in ("name", "initializer_range", "weights")
)


def _llama_figures(config: LlamaConfig) -> dict[str, Any]:
    heads = config.num_attention_heads
    return {
        "architectures": ["LlamaForCausalLM"],
        **{name: getattr(config, name) for name in _LLAMA_FIGURES},
        "num_key_value_heads": config.num_key_value_heads or heads,
        "head_dim": config.hidden_size // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _read_llama(content: Mapping[str, Any]) -> LlamaConfig:
    """Take Llama's figures, whether rotary ones are by themselves or together."""
    _refuse(content, hidden_act="silu", attention_bias=False, mlp_bias=False)
    rotary = content.get("rope_parameters") or content.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type={kind} stretches positions, which ours does not")
    width = content["hidden_size"] // content["num_attention_heads"]
    if (content.get("head_dim") or width) != width:
        raise ValueError(f"head_dim={content['head_dim']}: ours is {width}, hidden_size / heads")
    base = rotary.get("rope_theta", content.get("rope_theta", 10_000.0))
    figures = {name: content[name] for name in _LLAMA_FIGURES if name in content}
    return LlamaConfig(
        **{
            "tie_word_embeddings": False,
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            **figures,
            "rope_theta": base,
        }
    )


def _refuse(content: Mapping[str, Any], **only: Any) -> None:
    for name, value in only.items():
        if content.get(name, value) != value:
            raise ValueError(f"{name}={content[name]}: ours computes only {name}={value}")


_FORMATS = {
    "gpt": _Format("gpt2", _gpt_places, _gpt_figures, _read_gpt),
    "llama": _Format("llama", _llama_places, _llama_figures, _read_llama),
}
