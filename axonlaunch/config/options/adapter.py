"""Typed configuration of adapters, which are trained while the weights of the model stay fixed.

``axonlaunch.models.adapters.lora`` implements them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

MAGNITUDE = ".lora_magnitude_vector.weight"
"""Suffix of the name of a layer's DoRA magnitudes."""
_NAMES = (".lora_A.weight", ".lora_B.weight", MAGNITUDE)

EXPERTS = "_lora"
"""Suffix of the adapter of a packed parameter: ``gate_up_proj_lora``."""
_OF_EXPRESSIONS = frozenset("\\()|^$+")
"""Characters that are in no name and in no pattern, but in regular expressions."""


def is_expression(target: str) -> bool:
    """Return whether an entry of ``adapter.targets`` is a regular expression of complete names."""
    return not _OF_EXPRESSIONS.isdisjoint(target)


def is_of_adapter(name: str) -> bool:
    """Return whether a parameter name of an adapted model belongs to the adapter."""
    return name.endswith(_NAMES)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al., "LoRA", 2021), as PEFT computes and names them."""

    name: Literal["lora"] = "lora"
    """name of the adapter"""
    rank: int = field(default=8, metadata={"min": 1})
    """number of rows of A and columns of B; an adapted layer adds scale * B A x to its output"""
    alpha: float = field(default=16.0, metadata={"above": 0})
    """numerator of the scale, which is alpha / rank"""
    rslora: bool = False
    """use the scale alpha / sqrt(rank) (Kalajdzievski, "rsLoRA", 2023)"""
    dora: bool = False
    """scale each adapted weight to trained norms, one per output (Liu et al., "DoRA", 2024)"""
    dropout: float = field(default=0.0, metadata={"min": 0, "below": 1})
    """dropout probability of the input of A in training"""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """patterns of names, or of the ends of names, of linear layers, [q_proj,v_proj], and of 3-D
    parameters that pack experts, [experts.*]. An entry with one of \\ ( ) | ^ $ + is a regular
    expression of complete names of layers, as in PEFT. all-linear: all linear layers except the
    output head
    """
    base: Literal["nf4", "int8"] | None = None
    """format of the frozen linear weights and packed experts, in blocks of 64 values with an fp32
    scale: nf4 takes 4.5 bits per weight (Dettmers et al., "QLoRA", 2023), int8 8.5. They are
    quantized while they are read, and dequantized where they are used. Files that bitsandbytes
    quantized to nf4 are used unchanged. null: train.param_dtype
    """
    path: str | None = None
    """PEFT adapter folder that training starts from; it also sets rank, alpha, rslora, dora and
    targets. null: A is random, from the seed, and B is zero
    """

    @property
    def scale(self) -> float:
        """Factor by which the product of B and A is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid value."""
        if self.targets == []:
            return [("targets", "names nothing; use all-linear, or [q_proj,v_proj]")]
        issues = []
        for target in self.targets:
            try:
                re.compile(target if is_expression(target) else "")
            except (re.error, RecursionError, OverflowError) as error:
                issues.append(("targets", f"{target} is not a regular expression: {error}"))
        return issues
