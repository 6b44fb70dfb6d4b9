"""Decides from ``config.json`` which weights of a folder are quantized, and refuses most formats.

Weights that bitsandbytes quantized to NF4 are supported, because ``adapter.base=nf4`` stores the
same codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from axonlaunch.config.options.model import TransformersModel
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.models.hf.reading import library

QUANTIZATION = "quantization_config"
_INSTEAD = "give the weights that it was made from, with adapter.base=nf4 to quantize them"


def refuse_quantized(content: Mapping[str, Any], config: TransformersModel) -> None:
    """Refuse weights in a format that can't be used here.

    Args:
        content: Content of ``config.json``.
        config: Configuration of the model.

    Raises:
        ConfigError: Names the format.
    """
    if (method := _format(content)) and method != "bitsandbytes nf4":
        message = f"its weights are quantized ({method}), which can't be trained; {_INSTEAD}"
        raise ConfigError([ConfigIssue("model.path", message, config.path)])


def unquantized_modules(
    model: nn.Module, content: Mapping[str, Any], config: TransformersModel
) -> frozenset[str]:
    """Return the names of the modules with weights that are not quantized in their files.

    All modules except linear ones are, and the linear ones that transformers leaves out.

    Args:
        model: Model of transformers, without storage.
        content: Content of ``config.json``.
        config: Configuration of the model.

    Raises:
        ConfigError: Quantized weights are transposed.
    """
    if not _format(content):
        return frozenset()
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    is_quantized = library.quantizes(model, content[QUANTIZATION].get("llm_int8_skip_modules"))
    quantized = {name for name in linear if is_quantized(name)}
    for name in sorted(quantized):
        if not isinstance(linear[name], nn.Linear):
            message = f"its {name} is saved quantized and transposed, which can't be read; "
            raise ConfigError([ConfigIssue("model.path", message + _INSTEAD, config.path)])
    return frozenset(name for name, _ in model.named_modules() if name not in quantized)


def _format(content: Mapping[str, Any]) -> str:
    """Return the name of the weights' format; empty if they are not quantized."""
    quantization = content.get(QUANTIZATION) or {}
    if not isinstance(quantization, Mapping):
        return str(quantization)
    method = str(quantization.get("quant_method") or "")
    if method != "bitsandbytes" and not method.startswith("bitsandbytes_"):
        return method
    kind = quantization.get("bnb_4bit_quant_type", "fp4")
    is_4_bit = quantization.get("load_in_4bit") or quantization.get("_load_in_4bit")
    return f"bitsandbytes {kind if is_4_bit else 'int8'}"
