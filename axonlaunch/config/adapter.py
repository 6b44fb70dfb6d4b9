"""Typed configuration of adapters: what is trained beside a model whose own weights stay.

It holds values; ``axonlaunch.models.lora`` carries them out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

MAGNITUDE = ".lora_magnitude_vector.weight"
"""End of the name of a layer's magnitudes, of DoRA."""
_NAMES = (".lora_A.weight", ".lora_B.weight", MAGNITUDE)

EXPERTS = "_lora"
"""What a packed parameter's name ends in, where its adapter is meant: ``gate_up_proj_lora``."""


def is_of_adapter(name: str) -> bool:
    """Say whether a parameter of an adapted model is the adapter's, by its name."""
    return name.endswith(_NAMES)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al., "LoRA", 2021), as PEFT computes and names them."""

    name: Literal["lora"] = "lora"
    """name of the adapter"""
    rank: int = field(default=8, metadata={"min": 1})
    """rows of A and columns of B: an adapted layer adds scale * B A x to its output"""
    alpha: float = field(default=16.0, metadata={"above": 0})
    """the scale is alpha / rank"""
    rslora: bool = False
    """the scale is alpha / sqrt(rank) instead (Kalajdzievski, "rsLoRA", 2023)"""
    dora: bool = False
    """whether an adapted weight is scaled to norms that are trained, one an output (Liu et al.,
    "DoRA", 2024)
    """
    dropout: float = field(default=0.0, metadata={"min": 0, "below": 1})
    """share of what A is given that is left out in training"""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """patterns of names of linear layers, or of the ends of their names, [q_proj,v_proj], and of
    3-D parameters that pack experts, [experts.*]; all-linear: every linear layer but the head
    """

    path: str | None = None
    """folder that PEFT wrote, whose matrices the run starts from; rank, alpha, rslora, dora and
    targets are then its own. null: A is drawn by the seed, B is zero
    """

    @property
    def scale(self) -> float:
        """What the product of B and A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
        if self.targets == []:
            return [("targets", "names nothing; use all-linear, or [q_proj,v_proj]")]
        return []
