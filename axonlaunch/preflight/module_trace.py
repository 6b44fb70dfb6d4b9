"""Checks before the start whether the traces of ``train.trace.tensors=full`` fit on the disk."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from axonlaunch.config import ConfigIssue, RunConfig
from axonlaunch.data.datasets.dataset import Dataset, sample_inputs
from axonlaunch.models.fake.output_shapes import output_shapes
from axonlaunch.models.tensors.packed_blocks import logical_numel
from axonlaunch.system.storage.disk import free_bytes
from axonlaunch.system.text.formatting import size

_ELEMENT_BYTES = 4


def trace_problems(config: RunConfig, model: nn.Module, dataset: Dataset) -> Iterator[ConfigIssue]:
    """Yield a problem if the elements of the traced steps do not fit on the disk.

    Args:
        config: Configuration of a run that traces all elements of some steps.
        model: Complete model on the meta device; it is not changed.
        dataset: Dataset of the run; only the shape of its samples is used.
    """
    train = config.train
    num_parameters = sum(logical_numel(parameter) for parameter in model.parameters())
    shapes = output_shapes(copy.deepcopy(model), sample_inputs(dataset)).values()
    outputs = sum(math.prod(shape.full(train.global_batch_size)) for shape in shapes)
    # Each tensor is written with its gradient.
    needed = len(train.trace.steps) * 2 * (num_parameters + outputs) * _ELEMENT_BYTES
    folder, free = free_bytes(Path(config.run_dir if config.run_dir != "auto" else "runs"))
    if needed > free:
        message = (
            f"all elements of {len(train.trace.steps)} steps take {size(needed)}, but {folder} has "
            f"{size(free)} free; use fewer steps, a smaller train.global_batch_size, another "
            "run_dir, or train.trace.tensors=norms"
        )
        yield ConfigIssue("train.trace.tensors", message, train.trace.tensors)
