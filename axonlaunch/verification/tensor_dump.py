"""Keeps what both sides computed as two files of safetensors: whole tensors, the same names."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from axonlaunch.verification.recorded_steps import BothSides, Quantity

ONE_PROCESS = "one_process.safetensors"
LAYOUT = "layout.safetensors"


def write_sides(sides: BothSides, folder: Path) -> None:
    """Write both sides of every step; a file that is there is replaced.

    Names are ``step<N>/<kind>/<name>``, with the kinds ``output`` and ``output_gradient`` of
    modules, ``gradient`` and ``parameter`` (after the update) of parameters. What no rank has
    that could be compared is not in the layout's file; elements that none has are NaN. Of ranks
    that hold the same the first one's are written.

    Args:
        sides: What they computed.
        folder: Made if not there.
    """
    plain: dict[str, Tensor] = {}
    layout: dict[str, Tensor] = {}
    for quantity in sides.quantities():
        if not quantity.plain.numel():
            continue
        name = f"step{quantity.step}/{quantity.kind.replace(' ', '_')}/{quantity.name}"
        plain[name] = quantity.plain.contiguous().clone()
        if quantity.pairs:
            layout[name] = _assemble(quantity)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", "layout": str(sides.layout)}
    save_file(plain, folder / ONE_PROCESS, metadata=metadata)
    save_file(layout, folder / LAYOUT, metadata=metadata)


def _assemble(quantity: Quantity) -> Tensor:
    dtype = quantity.pairs[0].seen.dtype
    assembled = torch.full(quantity.plain.shape, math.nan, dtype=dtype)
    for pair in reversed(quantity.pairs):
        assembled[pair.index] = pair.seen.cpu()
    return assembled
