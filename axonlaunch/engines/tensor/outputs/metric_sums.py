"""Sums of a run's metrics over the counted samples of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from axonlaunch.data.datasets.dataset import Batch, MicroBatch
from axonlaunch.data.datasets.samples import map_tensors
from axonlaunch.models.specs.metrics import Metric
from axonlaunch.models.specs.model_spec import IGNORE_INDEX


def metric_sums(
    metrics: Sequence[Metric], outputs: Any, batch: MicroBatch, *, device: torch.device
) -> Tensor:
    """Return the sums of all metrics, one after another, 1-dim fp64.

    Args:
        metrics: Metrics of the run.
        outputs: Complete outputs of the model for the micro-batch.
        batch: Complete micro-batch, on any device. Rows without a counted target are left out.
        device: Device of the outputs.

    Raises:
        ConfigError: A metric does not return a tensor of its sums.
    """
    rows = _counted_rows(batch) if isinstance(batch, Batch) else None
    if not batch.is_counted or (rows is not None and not len(rows)):
        num_sums = sum(metric.num_sums for metric in metrics)
        return torch.zeros(num_sums, dtype=torch.float64, device=device)
    if rows is not None and len(rows) < batch.num_samples:
        outputs = map_tensors(lambda tensor: tensor[rows.to(tensor.device)], outputs)
        batch = batch.map(lambda tensor: tensor[rows.to(tensor.device)])
    full = batch.map(lambda tensor: tensor.to(device, non_blocking=True)).full
    return torch.cat([metric.sums(outputs, full).to(device) for metric in metrics])


def _counted_rows(batch: Batch) -> Tensor:
    """Return the indices of the rows that have a counted target, on the host."""
    targets = batch.targets[: len(batch) - batch.surplus].cpu()
    if targets.is_floating_point():
        return torch.arange(len(targets))
    return (targets != IGNORE_INDEX).reshape(len(targets), -1).any(1).nonzero().squeeze(1)
