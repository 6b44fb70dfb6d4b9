"""Whether what ``train.trace.tensors=full`` writes fits the disk, before there is a rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from axonlaunch.config import ConfigIssue, RunConfig
from axonlaunch.data.dataset import Dataset, sample_inputs
from axonlaunch.models.output_shapes import output_shapes
from axonlaunch.system.disk import free_bytes
from axonlaunch.system.formatting import size

_ELEMENT_BYTES = 4


def trace_problems(config: RunConfig, model: nn.Module, dataset: Dataset) -> Iterator[ConfigIssue]:
    """Yield why the elements of the traced steps can't be written.

    Args:
        config: The run's, which traces some steps in full.
        model: Whole, on the meta device; it is not changed.
        dataset: Its samples' shape is used.
    """
    train = config.train
    of_model = sum(parameter.numel() for parameter in model.parameters())
    shapes = output_shapes(copy.deepcopy(model), sample_inputs(dataset)).values()
    outputs = sum(math.prod(shape.whole(train.global_batch_size)) for shape in shapes)
    # Of each the value and the gradient.
    needed = len(train.trace.steps) * 2 * (of_model + outputs) * _ELEMENT_BYTES
    where = Path(config.run_dir if config.run_dir != "auto" else "runs")
    folder, free = free_bytes(where)
    if needed > free:
        message = (
            f"all elements of {len(train.trace.steps)} steps take {size(needed)}, {folder} has "
            f"{size(free)} free; name fewer steps, use a smaller train.global_batch_size, another "
            "run_dir, or train.trace.tensors=norms"
        )
        yield ConfigIssue("train.trace.tensors", message, train.trace.tensors)
