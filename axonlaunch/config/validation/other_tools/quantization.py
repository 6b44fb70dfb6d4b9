"""Translates quantization-aware training with torchao, as torchtune and axolotl configure it.

Values are those of torchtune's quantizer. axolotl trains with other scales of weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from axonlaunch.config.validation.other_tools.translation import Translation

_FORMAT = "qat_int8_int4"
_ONLY = "only int8 inputs with int4 weights are rounded in training (train.matmul_dtype)"
_QUANTIZER = "Int8DynActInt4WeightQATQuantizer"
_LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_HEAD = "the head is not rounded here; leave it out when the model is quantized"
_SCALES = "weights have symmetric scales here; axolotl trains with asymmetric ones"


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
    _set_start(translation, "fake_quant_after_n_steps")
    adapted = translation.settings.get("adapter.targets")
    if adapted is None or translation.flag("model.apply_lora_to_output"):
        translation.note(key, _HEAD)
    if adapted and (others := [name for name in _LINEAR_LAYERS if name not in adapted.value]):
        translation.set("train.matmul_exclude", others, key, note="only adapted layers are rounded")


def set_axolotl_types(translation: Translation) -> None:
    """Translate the block ``qat``."""
    weights, inputs, size = "qat.weight_dtype", "qat.activation_dtype", "qat.group_size"
    if not isinstance(translation.get("qat"), Mapping):
        return
    if (translation.get(weights), translation.get(inputs)) != ("int4", "int8"):
        written = [key for key in (weights, inputs) if translation.has(key)]
        translation.leave_out(written[0] if written else "qat", _ONLY)
        return
    translation.set("train.matmul_dtype", _FORMAT, weights, inputs)
    translation.set("train.matmul_group_size", int(translation.number(size, 32)), size)
    _set_start(translation, "qat.fake_quant_after_n_steps")
    translation.note(weights, _HEAD)
    translation.note(weights, _SCALES)


def _set_start(translation: Translation, key: str) -> None:
    if translation.has(key):
        translation.set("train.matmul_start_step", int(translation.number(key)), key)
