"""What an optimizer must know of a model's parameters: names, shapes, which are hidden matrices.

It looks at a whole model, on any device, and changes nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn

from axonlaunch.config import RunConfig
from axonlaunch.config.optimizer_states import ParameterFacts
from axonlaunch.config.parameter_groups import state_share
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.models.spec import ModelSpec


def parameter_facts(spec: ModelSpec, model: nn.Module) -> dict[str, ParameterFacts]:
    """Return the facts of every parameter that is trained, by name; a tied one's once.

    Args:
        spec: The model's, for its repeated blocks.
        model: Whole and undivided.
    """
    blocks = tuple(f"{name}." for name in spec.blocks(model))
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {
        name: ParameterFacts(
            name=name,
            shape=tuple(parameter.shape),
            is_hidden_matrix=parameter.ndim == 2
            and name.startswith(blocks)
            and id(parameter) not in tables,
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def share_of_states(config: RunConfig) -> float:
    """Return the bytes of a run's optimizer states beside those of its parameters: AdamW's are 2.

    Raises:
        ConfigError: The model can't be built, or the optimizer can't be tried.
    """
    return _share_of_states(
        _Chosen(config.model, config.optimizer, config.seed, config.train.parameter_bytes)
    )


@dataclass(frozen=True)
class _Chosen:
    """What the share depends on; equal where it is written alike."""

    model: Any
    optimizer: Any
    seed: int
    parameter_bytes: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Chosen) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


@functools.cache
def _share_of_states(chosen: _Chosen) -> float:
    model = on_meta(chosen.model, seed=chosen.seed)
    facts = parameter_facts(spec_for(chosen.model), model)
    return state_share(chosen.optimizer, facts.values(), parameter_bytes=chosen.parameter_bytes)
