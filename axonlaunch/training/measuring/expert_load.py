"""Turns the loads of experts into metrics, and notices routers that collapse."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from axonlaunch.engines.expert.balance import ExpertLoad

_COLLAPSED, _PERSISTENT = 0.9, 3
"""Share of the tokens at one expert, and the number of successive logged steps with it."""
_FIRST_STEPS = 100
"""Steps in which routers may be far from balance, and recover without help."""


class RouterWatch:
    """Notices routers that collapse: one expert computes 90% of the tokens of a layer.

    A router has collapsed if that is so in three successive logged steps, after the first steps of
    a run.
    """

    def __init__(self) -> None:
        self._steps: Counter[str] = Counter()

    def metrics(self, loads: Mapping[str, ExpertLoad]) -> dict[str, Any]:
        """Return the fields of ``StepLogged`` about experts; {} without experts."""
        if not loads:
            return {}
        by_block = {_block(name): round(load.relative, 4) for name, load in loads.items()}
        return {"expert_load": max(by_block.values()), "expert_loads": by_block}

    def notes(self, loads: Mapping[str, ExpertLoad], *, step: int) -> Iterator[str]:
        """Yield a text for each router that has just collapsed, at a logged step.

        Layers in which each token has more than half of the experts are left out, because an expert
        then gets most tokens even if the layer is balanced.
        """
        if step <= _FIRST_STEPS:
            return
        for name, load in loads.items():
            if load.most < 2 or load.share < _COLLAPSED:
                self._steps[name] = 0
                continue
            self._steps[name] += 1
            if self._steps[name] == _PERSISTENT:
                yield (
                    f"the router of {name.rpartition('.')[0] or name} has collapsed: one expert "
                    f"computes {load.share:.0%} of the tokens; a higher model.balance_rate "
                    "(with model.balance=bias) or model.router_aux_loss balances experts"
                )


def _block(name: str) -> str:
    """Return the number in a name, as text, or the name if it has none."""
    number = re.search(r"(?<![^.])\d+(?![^.])", name)
    return name if number is None else number.group()
