"""Tables of number formats and precisions."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch

from axonlaunch.config.optimization.optimizer import AdamWConfig
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.config.precision import (
    MIXED_PRECISION,
    NUMBER_FORMATS,
    PRECISIONS,
    GradientFormatName,
    MasterFormatName,
    NumberFormat,
    Precision,
    PrecisionName,
    ReducedFormatName,
    StateFormatName,
    state_format,
    update_format,
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
    assert {*get_args(PrecisionName)} == PRECISIONS.keys() == NUMBER_FORMATS.keys()
    assert {*get_args(ReducedFormatName)} <= NUMBER_FORMATS.keys()
    for names in (GradientFormatName, MasterFormatName, StateFormatName):
        assert {*get_args(names)} <= {*NUMBER_FORMATS, "parameter"}


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
    for key in ("parameters", "gradients", "reduce"):
        lower: Precision = dataclasses.replace(single, **{key: NUMBER_FORMATS["bf16"]})
        assert lower.lowest.name == "bf16"
    half = dataclasses.replace(PRECISIONS["fp16"], reduce=NUMBER_FORMATS["bf16"])
    assert half.lowest.name == "bf16"


@pytest.mark.parametrize(
    ("options", "stored", "updated"),
    [
        ({}, None, None),
        ({"state_dtype": "fp32"}, "fp32", "fp32"),
        ({"state_dtype": "bf16"}, "bf16", "fp32"),
        ({"master_weights": "fp32"}, "fp32", "fp32"),
        ({"master_weights": "fp32", "state_dtype": "bf16"}, "bf16", "fp32"),
    ],
)
def test_updates_compute_in_fp32_if_states_or_masters_have_a_dtype(
    options: dict[str, str], stored: str | None, updated: str | None
) -> None:
    optimizer: Any = AdamWConfig(**options)  # type: ignore[arg-type]
    assert state_format(optimizer) == NUMBER_FORMATS.get(stored or "")
    assert update_format(optimizer) == NUMBER_FORMATS.get(updated or "")
    assert state_format(object()) is None
