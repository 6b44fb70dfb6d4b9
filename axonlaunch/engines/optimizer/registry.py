"""Registers optimizers and learning-rate schedules from plug-ins and packages.

The registries are in ``config.optimization``, which lists names without importing the code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar

from axonlaunch.config.optimization.optimizer import (
    OPTIMIZERS,
    FreeOptimizerConfig,
    GroupedOptimizer,
)
from axonlaunch.config.optimization.optimizer_states import OptimizerFacts, OptimizerState, Sharding
from axonlaunch.config.optimization.schedules import SCHEDULERS
from axonlaunch.config.registry import keywords_of

_Builder = TypeVar("_Builder", bound=Callable[..., Any])
_Schedule = TypeVar("_Schedule", bound=Callable[..., float])


def register_optimizer(
    name: str,
    *,
    config: type | None = None,
    states: Sequence[OptimizerState] | None = None,
    sharding: Sharding | None = None,
    fixed: Mapping[str, Any] | None = None,
    summary: str | None = None,
) -> Callable[[_Builder], _Builder]:
    """Register an optimizer class, or a function that creates one, as ``optimizer=NAME``.

    It is called with parameter groups, each a dict of ``params`` and options, and with the options
    of the optimizer as keywords. The result must be a ``torch.optim.Optimizer``.

    Args:
        name: Name of the optimizer.
        config: Frozen dataclass with the fields ``name`` and ``lr`` that types the group
            ``optimizer``. Its other fields are keywords of the class, and options of parameter
            groups. None: the keywords are ``lr`` and the entries of ``optimizer.arguments``.
        states: States that the optimizer keeps for each parameter; None determines them on small
            parameters.
        sharding: Way of handling sharded parameters, see ``OptimizerFacts``; None tests whether the
            update is elementwise.
        fixed: Keywords that users cannot change, such as ``{"fused": True}``.
        summary: One line for ``axonlaunch ls optimizer``; None for the docstring's first line.

    Raises:
        ValueError: The name is taken, or the configuration is not a frozen dataclass with a name
            and a learning rate.
    """
    if config is not None:
        config = _with_groups(name, config)
    facts = OptimizerFacts(
        states=None if states is None else tuple(states), sharding=sharding, fixed=dict(fixed or {})
    )
    return OPTIMIZERS.register(
        name, config=config or FreeOptimizerConfig, facts=facts, summary=summary, passed=1
    )


def register_scheduler(
    name: str, *, config: type | None = None, summary: str | None = None
) -> Callable[[_Schedule], _Schedule]:
    """Register a function ``(step, steps) -> factor`` as ``scheduler=NAME``.

    It is called before each step with the number of steps done and the number of steps of the run.
    The result, a number from 0, multiplies the peak learning rate of each parameter group, also
    during warm-up. It must depend only on its arguments, because a resumed run calls it again.

    Args:
        name: Name of the schedule.
        config: Dataclass with a field ``name`` that types the group ``scheduler``; the function
            gets an instance as its third argument. None: it gets the entries of
            ``scheduler.arguments`` as keywords.
        summary: One line for ``axonlaunch ls scheduler``; None for the docstring's first line.

    Raises:
        ValueError: The name is taken, or the configuration is not a dataclass with a name.
    """
    SCHEDULERS.check_config(name, config)

    def register(schedule: _Schedule) -> _Schedule:
        def with_options(options: Any) -> Callable[[int, int], float]:
            if config is not None:
                return lambda step, steps: schedule(step, steps, options)
            return lambda step, steps: schedule(step, steps, **options.arguments)

        described = summary or (schedule.__doc__ or f"from {schedule.__module__}").splitlines()[0]
        arguments = None if config else keywords_of(schedule, passed=2)
        SCHEDULERS.add(name, with_options, summary=described, config=config, arguments=arguments)
        return schedule

    return register


def _with_groups(name: str, config: type) -> type:
    """Return a user's dataclass extended by the field ``groups``, which all optimizers have."""
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
    """Pickle as the registered class and its values: the derived class exists only in memory."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return _restore, (type(config).__mro__[1], values)


def _restore(named: type, values: dict[str, Any]) -> Any:
    """Recreate a configuration; unpickling ``named`` imported the module that registers it."""
    del named
    return OPTIMIZERS.config(values["name"])(**values)
