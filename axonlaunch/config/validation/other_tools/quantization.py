"""Translates quantization-aware training with torchao, as torchtune and axolotl configure it."""

from __future__ import annotations

from axonlaunch.config.validation.other_tools.translation import Translation

_FORMAT = "qat_int8_int4"
_ONLY = "only int8 inputs with int4 weights are rounded in training (train.matmul_dtype)"
_QUANTIZER = "Int8DynActInt4WeightQATQuantizer"
_LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_HEAD = "the head is not rounded here; leave it out when the model is quantized"


def set_torchtune_quantizer(translation: Translation) -> None:
    """Translate the component ``quantizer``, after the adapter is set."""
    key, size = "quantizer._component_", "quantizer.groupsize"
    component = str(translation.get(key) or "").rsplit(".", 1)[-1]
    if not component:
        return
    if component.removesuffix("ModuleSwap") != _QUANTIZER:
        translation.leave_out(key, _ONLY)
        return
    translation.set("train.matmul_dtype", _FORMAT, key)
    translation.set("train.matmul_group_size", int(translation.number(size, 256)), size)
    if (targets := translation.settings.get("adapter.targets")) is None:
        translation.note(key, _HEAD)
    elif others := [name for name in _LINEAR_LAYERS if name not in targets.value]:
        translation.set("train.matmul_exclude", others, key, note="only adapted layers are rounded")


def set_axolotl_types(translation: Translation) -> None:
    """Translate the block ``qat``."""
    weights, inputs, size = "qat.weight_dtype", "qat.activation_dtype", "qat.group_size"
    if not any(map(translation.has, (weights, inputs, size))):
        return
    if (translation.get(weights), translation.get(inputs)) != ("int4", "int8"):
        translation.leave_out(weights if translation.has(weights) else inputs, _ONLY)
        return
    translation.set("train.matmul_dtype", _FORMAT, weights, inputs)
    translation.set("train.matmul_group_size", int(translation.number(size, 32)), size)
    translation.note(weights, _HEAD)
