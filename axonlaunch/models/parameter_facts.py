"""What an optimizer must know of a model's parameters: names, shapes, which are hidden matrices.

It looks at a whole model, on any device, and changes nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Self

from torch import nn

from axonlaunch.config import RunConfig
from axonlaunch.config.optimizer_states import ParameterFacts
from axonlaunch.config.parameter_groups import state_bytes
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.models.flops import looked_up_parameters
from axonlaunch.models.spec import ModelSpec

_FP32 = 4
"""Bytes of an element of what is trained beside an adapter, and of the adapter's."""


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


LARGE = 4 * 2**20
"""Bytes from which ZeRO-1 gathers a parameter by itself, straight to its place."""


@dataclass(frozen=True)
class TrainingShares:
    """What training keeps beside the bytes of a model's parameters, as shares of those.

    Attributes:
        gradients: 1, or less where parameters are frozen.
        states: Of the optimizer; AdamW's are 2.
        small: Of parameters of less than ``LARGE`` bytes.
        looked_up: Of parameters that no product reads.
    """

    gradients: float = 1.0
    states: float = 2.0
    small: float = 1.0
    looked_up: float = 0.0

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return a run's.

        Raises:
            ConfigError: The model can't be built, or the optimizer can't be tried.
        """
        return cls(*_shares(_Chosen(config)))


@dataclass(frozen=True)
class _Chosen:
    """A run, equal to another where what the shares depend on is written alike."""

    config: RunConfig

    @property
    def _written(self) -> str:
        config = self.config
        train = config.train
        chosen = (train.param_dtype, train.freeze, train.unfreeze)
        return repr((config.model, config.adapter, config.optimizer, config.seed, chosen))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Chosen) and self._written == other._written

    def __hash__(self) -> int:
        return hash(self._written)


@functools.cache
def _shares(chosen: _Chosen) -> tuple[float, float, float, float]:
    config = chosen.config
    element = config.train.parameter_bytes
    model = on_meta(config, seed=config.seed)
    facts = parameter_facts(spec_for(config), model)
    whole = element * max(1, sum(parameter.numel() for parameter in model.parameters()))
    trained = element if config.adapter is None else _FP32
    gradients = trained * sum(p.numel() for p in model.parameters() if p.requires_grad)
    states = state_bytes(config.optimizer, facts.values(), parameter_bytes=trained)
    small, looked_up = small_bytes(model, element=element), element * looked_up_parameters(model)
    return gradients / whole, states / whole, small / whole, looked_up / whole


def small_bytes(model: nn.Module, *, element: int) -> int:
    """Return the bytes of all parameters of less than ``LARGE`` bytes, of so many an element."""
    sizes = (element * parameter.numel() for parameter in model.parameters())
    return sum(size for size in sizes if size < LARGE)
