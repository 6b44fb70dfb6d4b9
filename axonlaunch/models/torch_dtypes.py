"""Converts number formats of configurations to torch dtypes."""

from __future__ import annotations

import torch

from axonlaunch.config.precision import MATMUL_FORMATS, NUMBER_FORMATS, Float8Format, NumberFormat


def torch_dtype(number_format: NumberFormat) -> torch.dtype:
    """Return the torch dtype of a format."""
    dtype: torch.dtype = getattr(torch, number_format.dtype)
    return dtype


FORMAT_OF_DTYPE = {torch_dtype(each): each for each in NUMBER_FORMATS.values()}
_PEAKS: dict[torch.dtype, str] = {dtype: each.peak for dtype, each in FORMAT_OF_DTYPE.items()} | {
    getattr(torch, dtype): each.peak
    for each in MATMUL_FORMATS.values()
    if isinstance(each, Float8Format)
    for dtype in (each.dtype, each.gradient_dtype)
}


def peak_of(dtype: torch.dtype) -> str:
    """Return the field of ``HardwareConfig`` with the peak rate of products of a dtype."""
    return _PEAKS.get(dtype, _PEAKS[torch.float32])
