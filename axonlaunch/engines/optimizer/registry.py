"""How an optimizer joins: ``register_optimizer``, in a plug-in or in a package that offers it.

The table itself is ``config.optimizer``'s; it lists names without importing what is behind them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar

from axonlaunch.config.optimizer import OPTIMIZERS, FreeOptimizerConfig, GroupedOptimizer
from axonlaunch.config.optimizer_states import OptimizerFacts, OptimizerState, Sharding

_Builder = TypeVar("_Builder", bound=Callable[..., Any])


def register_optimizer(
    name: str,
    *,
    config: type | None = None,
    states: Sequence[OptimizerState] | None = None,
    sharding: Sharding | None = None,
    fixed: Mapping[str, Any] | None = None,
    summary: str | None = None,
) -> Callable[[_Builder], _Builder]:
    """Register a ``torch.optim.Optimizer`` class, or what makes one, as ``optimizer=NAME``.

    It is called with groups of parameters, each a dict of ``params`` and its options, and with the
    options of the optimizer as keywords.

    Args:
        name: The name.
        config: Frozen dataclass with the fields ``name`` and ``lr`` that types the group
            ``optimizer``; its other fields are keywords of the class, and options of groups of
            parameters. None: the keywords are ``lr`` and those of ``optimizer.arguments``.
        states: What it keeps of each parameter; None: it is tried on small ones.
        sharding: What it makes of a parameter that is divided among ranks, as ``OptimizerFacts``
            has it; None: it is tried whether it updates each element by itself.
        fixed: Keywords that are no choice of a user's, ``{"fused": True}``.
        summary: One line for ``axonlaunch ls optimizer``; None: the docstring's first.

    Raises:
        ValueError: The name is taken, or the configuration is no frozen dataclass with a name and
            a learning rate.
    """
    if config is not None:
        config = _with_groups(name, config)
    facts = OptimizerFacts(
        states=None if states is None else tuple(states), sharding=sharding, fixed=dict(fixed or {})
    )
    return OPTIMIZERS.register(
        name, config=config or FreeOptimizerConfig, facts=facts, summary=summary, passed=1
    )


def _with_groups(name: str, config: type) -> type:
    """Return a user's dataclass with the field ``groups``, which every optimizer here has."""
    fields = {field.name for field in dataclasses.fields(config)} if is_dataclass(config) else set()
    if not {"name", "lr"} <= fields or not config.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise ValueError(
            f"register_optimizer({name!r}, config={config.__name__}): it is not a frozen dataclass "
            f'with the fields name and lr; write @dataclass(frozen=True), name: str = "{name}" and '
            "lr: float = 1e-3"
        )
    if "groups" in fields:
        return config
    return dataclasses.make_dataclass(
        config.__name__,
        (),
        bases=(config, GroupedOptimizer),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": config.__doc__, "__reduce__": _reduce},
    )


def _reduce(config: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Pickle by the user's own class, for the one with ``groups`` has no name in any module."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return _restore, (type(config).__mro__[1], values)


def _restore(named: type, values: dict[str, Any]) -> Any:
    """Make a configuration again; unpickling ``named`` imported its module, which registers it."""
    del named
    return OPTIMIZERS.config(values["name"])(**values)
