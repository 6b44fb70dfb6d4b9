"""Floating-point operations that a model needs, from its sizes: what MFU is a share of."""

from __future__ import annotations

from torch import nn


def looked_up_parameters(model: nn.Module) -> int:
    """Return how many parameters a token only looks up: embeddings that no head multiplies with.

    Args:
        model: Whole, on any device.
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
    """Return how many parameters have no gradient, without those that a token only looks up.

    Args:
        model: Whole, on any device.
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
    """Return the FLOPs that forward and backward of a token need: 6 N - 2 F + 12 L H Q T.

    N parameters without those that are looked up, F of them frozen, which need no gradient of their
    own, L layers, H heads of Q numbers, T positions, as if attention saw them all; nothing for what
    is computed again.

    Args:
        parameters: Of the model.
        looked_up: Of these, the embedding's, as ``looked_up_parameters`` counts them.
        layers: Blocks with attention.
        hidden_size: H x Q; 0 where it is not known, which leaves attention out.
        positions: Of a sample.
        frozen: Of the parameters, as ``frozen_parameters`` counts them.

    Source: Chowdhery et al., "PaLM", 2022, appendix B; pytorch/torchtitan leaves the embedding out
    too, ``torchtitan/models/utils.py``.
    """
    return float(6 * (parameters - looked_up) - 2 * frozen + 12 * layers * hidden_size * positions)
