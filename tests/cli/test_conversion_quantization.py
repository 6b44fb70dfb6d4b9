"""Quantized bases and quantization-aware training in configurations of other tools."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.other_tools import (
    AXOLOTL,
    FILES,
    TORCHTUNE,
    Converter,
    check_values,
    left_out,
    values_of,
)


@pytest.mark.parametrize(
    ("tool", "added", "base"),
    [
        ("axolotl", "load_in_4bit: true\nadapter: qlora", "nf4"),
        ("axolotl", "load_in_8bit: true", "int8"),
        ("llamafactory", "quantization_bit: 4\nquantization_method: bitsandbytes", "nf4"),
        ("torchtune", "model: {_component_: torchtune.models.llama3_1.qlora_llama3_1_8b}", "nf4"),
        ("trl", "use_peft: true\nload_in_4bit: true", "nf4"),
    ],
)
def test_qlora_becomes_a_quantized_base(
    tool: str, added: str, base: str, convert: Converter
) -> None:
    translation = convert(FILES[tool], added)
    assert translation.settings["adapter.base"].value == base
    assert not translation.changes_training


def test_a_quantized_base_without_adapter_is_left_out(convert: Converter) -> None:
    translation = convert(FILES["trl"], "use_peft: false\nload_in_4bit: true")
    assert [*left_out(translation)] == ["load_in_4bit"]


@pytest.mark.parametrize(
    ("tool", "added", "exclude"),
    [
        (
            "torchtune",
            "quantizer:\n  _component_: torchtune.training.quantization."
            "Int8DynActInt4WeightQATQuantizer\n  groupsize: 64\nfake_quant_after_n_steps: 9\n",
            ["k_proj", "v_proj"],  # not adapted
        ),
        (
            "axolotl",
            "qat: {activation_dtype: int8, weight_dtype: int4, group_size: 64, "
            "fake_quant_after_n_steps: 9}\n",
            [],
        ),
    ],
)
def test_quantization_aware_training_of_torchao_is_translated(
    tool: str, added: str, exclude: list[str], convert: Converter, tmp_path: Path
) -> None:
    translation = convert(FILES[tool], added)
    assert left_out(translation) == {}
    check_values(
        values_of(translation, tmp_path),
        {
            "train.matmul_dtype": "qat_int8_int4",
            "train.matmul_group_size": 64,
            "train.matmul_start_step": 9,
            "train.matmul_exclude": exclude,
        },
    )


@pytest.mark.parametrize(
    ("tool", "added", "key"),
    [
        ("torchtune", "quantizer: {_component_: a.Int4WeightOnlyQATQuantizer}", "_component_"),
        ("axolotl", "qat: {weight_dtype: nvfp4, group_size: 16}", "weight_dtype"),
        ("axolotl", "qat: {activation_dtype: int8, group_size: 16}", "activation_dtype"),
        ("axolotl", "qat: {quantize_embedding: false}", "qat"),
        ("axolotl", "qat: {fake_quant_after_n_steps: 9}", "qat"),
    ],
)
def test_other_types_of_quantization_are_left_out(
    tool: str, added: str, key: str, convert: Converter
) -> None:
    [(left, text)] = left_out(convert(FILES[tool], added)).items()
    assert left.rpartition(".")[2] == key
    assert "only int8 inputs with int4 weights are rounded in training" in text


def test_quantization_that_differs_from_the_other_tool_is_noted(convert: Converter) -> None:
    """torchtune rounds an adapted head; axolotl trains with asymmetric scales of weights."""

    def texts(document: str, added: str) -> str:
        return " ".join(each.text for each in convert(document, added).remarks)

    quantizer = "quantizer: {_component_: a.Int8DynActInt4WeightQATQuantizer}\n"
    adapted = TORCHTUNE.replace("model:\n", "model:\n  apply_lora_to_output: true\n", 1)
    assert "the head is not rounded here" not in texts(TORCHTUNE, quantizer)
    assert "the head is not rounded here" in texts(adapted, quantizer)
    types = "qat: {activation_dtype: int8, weight_dtype: int4}\n"
    assert "axolotl trains with asymmetric ones" in texts(AXOLOTL, types)
