"""Reads the flags by which single messages are left out of the loss.

``training``, ``train``, ``loss`` and ``weight`` say whether a message counts, ``mask`` and
``masked`` whether it does not. Weights between 0 and 1 are refused.
"""

from __future__ import annotations

from typing import Any

_COUNTS = ("training", "train", "loss", "weight", "loss_weight")
_LEAVES_OUT = ("mask", "masked")


def take_flag(message: dict[str, Any], position: str) -> bool:
    """Remove a message's flags, and return whether the message counts in the loss.

    Args:
        message: Message, which is changed in place: templates do not read flags.
        position: Position of the message, for errors.

    Raises:
        ValueError: A flag is neither true or 1 nor false or 0.
    """
    counts = True
    for names, positive in ((_COUNTS, True), (_LEAVES_OUT, False)):
        for name in names:
            if name not in message:
                continue
            flag = message.pop(name)
            if not isinstance(flag, bool | int | float) or flag not in (0, 1):
                raise ValueError(
                    f"{position} has {name}={flag}; a message counts or does not, so write 0 or 1"
                )
            counts = counts and bool(flag) == positive
    return counts
