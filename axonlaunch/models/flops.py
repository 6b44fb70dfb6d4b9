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


def training_flops_per_token(
    *, parameters: int, looked_up: int, layers: int, hidden_size: int, positions: int
) -> float:
    """Return the FLOPs that forward and backward of a token need: 6 N + 12 L H Q T.

    N parameters without those that are looked up, L layers, H heads of Q numbers, T positions, as
    if attention saw them all; nothing for what is computed again.

    Args:
        parameters: Of the model.
        looked_up: Of these, the embedding's, as ``looked_up_parameters`` counts them.
        layers: Blocks with attention.
        hidden_size: H x Q; 0 where it is not known, which leaves attention out.
        positions: Of a sample.

    Source: Chowdhery et al., "PaLM", 2022, appendix B; pytorch/torchtitan leaves the embedding out
    too, ``torchtitan/models/utils.py``.
    """
    return float(6 * (parameters - looked_up) + 12 * layers * hidden_size * positions)
