"""Writes the tensors of the reference and of the layout to two safetensors files.

Both files contain full tensors under the same names.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from axonlaunch.verification.locating.recorded_steps import Quantity, RecordedSteps

ONE_PROCESS = "one_process.safetensors"
LAYOUT = "layout.safetensors"


def write_tensors(recorded: RecordedSteps, folder: Path) -> None:
    """Write the tensors of every recorded step; existing files are replaced.

    Names are ``step<N>/<kind>/<name>``. Modules have the kinds ``output`` and ``output_gradient``,
    parameters have ``gradient`` and ``parameter`` (after the update). Tensors that no rank has in a
    comparable form are missing from the layout's file, and elements that no rank holds are NaN.
    Elements held by several ranks are taken from the first of them.

    Args:
        folder: Folder for the files; created if missing.
    """
    plain: dict[str, Tensor] = {}
    layout: dict[str, Tensor] = {}
    for quantity in recorded.quantities():
        if not quantity.plain.numel():
            continue
        name = f"step{quantity.step}/{quantity.kind.replace(' ', '_')}/{quantity.name}"
        plain[name] = quantity.plain.contiguous().clone()
        if quantity.pairs:
            layout[name] = _assemble(quantity)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", "layout": str(recorded.layout)}
    save_file(plain, folder / ONE_PROCESS, metadata=metadata)
    save_file(layout, folder / LAYOUT, metadata=metadata)


def _assemble(quantity: Quantity) -> Tensor:
    dtype = quantity.pairs[0].actual.dtype
    assembled = torch.full(quantity.plain.shape, math.nan, dtype=dtype)
    for pair in reversed(quantity.pairs):
        assembled[pair.index] = pair.actual.cpu()
    return assembled
