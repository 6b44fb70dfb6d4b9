"""A metric: the fraction of targets among the two highest outputs."""

from __future__ import annotations

import torch

import axonlaunch as ax


@ax.register_metric("top_two")
def top_two(outputs, batch):
    """Fraction of targets among the two highest outputs."""
    counted = batch["targets"] != -100
    hits = (outputs.topk(2).indices == batch["targets"][..., None]).any(-1) & counted
    return torch.stack([hits.sum(), counted.sum()])
