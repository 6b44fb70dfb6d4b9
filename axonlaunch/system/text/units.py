"""Names metrics by what the loss counts: tokens, images, samples, or several targets per sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

Counted = Literal["tokens", "images", "samples", "targets"]


def named_by_unit(fields: Mapping[str, Any], counted: Counted) -> dict[str, Any]:
    """Return fields of an event with the unit in their names.

    If targets are images, ``tokens_per_s`` becomes ``images_per_s``.
    """
    return {name.replace("tokens", counted): value for name, value in fields.items()}


def rate_in(content: Mapping[str, Any]) -> tuple[Counted, Any]:
    """Return the unit and the rate in a summary or a line of metrics; the rate is None if missing.

    This is the inverse of ``named_by_unit``.
    """
    for unit in get_args(Counted):
        if (rate := content.get(f"{unit}_per_s")) is not None:
            return unit, rate
    return "tokens", None
