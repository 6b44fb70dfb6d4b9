"""Counts the floating-point operations of a model from its sizes, for MFU."""

from __future__ import annotations

from torch import nn


def looked_up_parameters(model: nn.Module) -> int:
    """Return the number of embedding parameters that no matrix product uses.

    A tied embedding is used by the head and does not count.

    Args:
        model: Unsharded model on any device.
    """
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    multiplied = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    return sum(table.numel() for key, table in tables.items() if key not in multiplied)


def frozen_parameters(model: nn.Module) -> int:
    """Return the number of parameters without a gradient, not counting embeddings.

    Args:
        model: Unsharded model on any device.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return sum(p.numel() for p in model.parameters() if not p.requires_grad and id(p) not in tables)


def training_flops_per_token(
    *,
    parameters: int,
    looked_up: int,
    layers: int,
    hidden_size: int,
    positions: int,
    frozen: int = 0,
) -> float:
    """Return the FLOPs of forward and backward for one token: 6 N - 2 F + 12 L H Q T.

    N is the number of parameters without those that are only looked up. F of them are frozen and
    need no weight gradient. L is the number of layers, with H heads of size Q, and T is the number
    of positions, as if every token attended to all positions. Recomputation is not counted.

    Args:
        parameters: Number of parameters of the model.
        looked_up: Number of parameters that are only looked up (see ``looked_up_parameters``).
        layers: Number of blocks with attention.
        hidden_size: H x Q; 0 if unknown, which leaves out attention.
        positions: Number of positions of a sample.
        frozen: Number of frozen parameters (see ``frozen_parameters``).

    Source: Chowdhery et al., "PaLM", 2022, appendix B; pytorch/torchtitan leaves out the embedding
    too, ``torchtitan/models/utils.py``.
    """
    return float(6 * (parameters - looked_up) - 2 * frozen + 12 * layers * hidden_size * positions)
