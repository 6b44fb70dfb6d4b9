"""Finds the modules of a transformers model whose experts can be divided among ranks."""

from __future__ import annotations

import re
from typing import Any

_STYLE = "ep_dispatch_experts"
"""transformers' style for modules of experts, in the plan of an architecture's configuration."""


def expert_modules(model: Any) -> tuple[str, ...]:
    """Return the full names of the modules that transformers' expert plan divides, in order.

    Args:
        model: A model, or a pipeline stage with the same names.
    """
    plan: dict[str, str] = getattr(model, "ep_plan", None) or {}
    patterns = [pattern for pattern, style in plan.items() if style == _STYLE]
    if not patterns:
        return ()
    names = "|".join(re.escape(pattern).replace(r"\*", r"\d+") for pattern in patterns)
    is_expert = re.compile(names).fullmatch
    return tuple(
        name
        for name, module in model.named_modules()
        if is_expert(name) and isinstance(module.num_experts, int)
    )


def use_plain_experts(model: Any) -> None:
    """Use transformers' implementation of experts that computes them one after another."""
    if expert_modules(model):
        model.set_experts_implementation("eager")
