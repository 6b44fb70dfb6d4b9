"""Tables of number formats and precisions."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
import torch

from axonlaunch.config.optimization.optimizer import AdamWConfig
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.config.precision import (
    MIXED_PRECISION,
    NUMBER_FORMATS,
    PRECISIONS,
    NumberFormat,
    Precision,
    PrecisionName,
    StoredFormatName,
    state_format,
)
from axonlaunch.models.torch_dtypes import FORMAT_OF_DTYPE, torch_dtype

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("number_format", NUMBER_FORMATS.values(), ids=NUMBER_FORMATS)
def test_number_format_agrees_with_torch(number_format: NumberFormat) -> None:
    dtype = torch_dtype(number_format)
    assert dtype == DTYPES[number_format.name]
    assert FORMAT_OF_DTYPE[dtype] == number_format
    assert number_format.nbytes == dtype.itemsize
    assert number_format.roundoff == torch.finfo(dtype).eps / 2
    assert number_format.is_low == (dtype != torch.float32)
    assert number_format.tolerance > number_format.roundoff


def test_precision_peaks_are_hardware_fields() -> None:
    fields = {field.name for field in dataclasses.fields(HardwareConfig)}
    assert {each.peak for each in PRECISIONS.values()} <= fields
    assert {each.relaxed_peak for each in PRECISIONS.values()} <= fields


def test_keys_of_the_configuration_accept_the_names_of_the_tables() -> None:
    assert {*get_args(PrecisionName)} == PRECISIONS.keys()
    assert {*get_args(StoredFormatName)} <= NUMBER_FORMATS.keys()


def test_precision_computes_in_the_dtype_of_its_name() -> None:
    for name, precision in PRECISIONS.items():
        formats = (precision.compute, precision.gather, precision.reference)
        assert {torch_dtype(each) for each in formats} == {DTYPES[name]}
    assert torch_dtype(MIXED_PRECISION.compute) == torch.bfloat16


def test_only_fp16_needs_a_loss_scale() -> None:
    assert [name for name, each in PRECISIONS.items() if each.needs_loss_scale] == ["fp16"]


def test_lowest_format_includes_parameters_and_reductions() -> None:
    single = PRECISIONS["fp32"]
    assert single.lowest.name == "fp32"
    for key in ("parameters", "reduce"):
        lower: Precision = dataclasses.replace(single, **{key: NUMBER_FORMATS["bf16"]})
        assert lower.lowest.name == "bf16"
    half = dataclasses.replace(PRECISIONS["fp16"], reduce=NUMBER_FORMATS["bf16"])
    assert half.lowest.name == "bf16"


def test_state_format_is_unset_unless_state_dtype_is_fp32() -> None:
    assert state_format(AdamWConfig()) is None
    assert state_format(AdamWConfig(state_dtype="fp32")) == NUMBER_FORMATS["fp32"]
    assert state_format(object()) is None
