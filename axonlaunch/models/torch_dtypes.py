"""Converts number formats of configurations to torch dtypes."""

from __future__ import annotations

import torch

from axonlaunch.config.precision import NUMBER_FORMATS, NumberFormat


def torch_dtype(number_format: NumberFormat) -> torch.dtype:
    """Return the torch dtype of a format."""
    dtype: torch.dtype = getattr(torch, number_format.dtype)
    return dtype


FORMAT_OF_DTYPE = {torch_dtype(each): each for each in NUMBER_FORMATS.values()}
