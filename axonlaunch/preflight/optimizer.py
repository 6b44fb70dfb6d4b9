"""Why an optimizer can't update a model in a layout, or is not what its entry says that it is.

It tries optimizers of others on small parameters; ours are known by what is written of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.layout import layout, world_size
from axonlaunch.config.optimizer import OPTIMIZERS, OWN_OPTIMIZERS, FreeOptimizerConfig
from axonlaunch.config.optimizer_states import ParameterFacts
from axonlaunch.config.parameter_groups import (
    LR_SCALE,
    group_problems,
    sharding_of,
    states_of,
    with_options,
)
from axonlaunch.engines.optimizer.probe import probe
from axonlaunch.models.parameter_facts import parameter_facts
from axonlaunch.models.spec import ModelSpec
from axonlaunch.registry import unknown


def optimizer_problems(config: RunConfig, spec: ModelSpec, model: nn.Module) -> list[ConfigIssue]:
    """Return why a run's optimizer can't update its model.

    Args:
        config: With ``launch.nproc`` resolved.
        spec: The model's.
        model: Whole, on ``meta`` or not.
    """
    facts = [*parameter_facts(spec, model).values()]
    problems = list(group_problems(config.optimizer, facts))
    if problems:
        return problems
    try:
        if config.optimizer.name not in OWN_OPTIMIZERS:
            problems += _of_others(config.optimizer, facts)
        if not problems:
            problems += _in_this_layout(config, facts)
    except ConfigError as error:
        return error.problems
    return problems


def _in_this_layout(config: RunConfig, facts: list[ParameterFacts]) -> Iterator[ConfigIssue]:
    """Refuse layouts that divide what an optimizer needs whole, or stream what it exchanges."""
    shares = layout(config, world_size=world_size(config))
    needs = {sharding_of(with_options(config.optimizer, one)) for one in facts}
    divided = []
    if shares.optimizer_shards > 1:
        divided.append(shares.data_parallel)
    if shares.tensor > 1:
        divided.append("tensor parallelism")
    name = config.optimizer.name
    if "whole" in needs and divided:
        message = (
            "it updates a parameter's elements by what is in the others, and "
            f"{' and '.join(divided)} leave{'s' if len(divided) == 1 else ''} each rank a part; "
            "use strategy=single, ddp or pipeline"
        )
        yield ConfigIssue("optimizer.name", message, name)
    offload = config.strategy.fsdp.cpu_offload
    if "collective" in needs and shares.facts.shards_parameters and offload != "none":
        message = (
            f"optimizer={name} exchanges parts of parameters among ranks while it updates them, "
            "and offloaded ones pass through the device one by one; use none, or adamw"
        )
        yield ConfigIssue("strategy.fsdp.cpu_offload", message, offload)


def _of_others(config: Any, facts: list[ParameterFacts]) -> Iterator[ConfigIssue]:
    """Try an optimizer of somebody else's: is it as declared, and does it take its groups' options.

    Raises:
        ConfigError: It can't be made, fails, or keeps what a checkpoint can't save.
    """
    chosen = {len(one.shape): with_options(config, one) for one in facts}
    tried = {ndim: probe(one, ndim) for ndim, one in chosen.items()}
    defaults = frozenset.union(*(one.defaults for one in tried.values()))
    if isinstance(config, FreeOptimizerConfig):
        for pattern, options in config.groups.items():
            for option in options.keys() - defaults - {LR_SCALE}:
                message = unknown("option of a group", option, sorted({*defaults, LR_SCALE}))
                value = options[option]
                yield ConfigIssue(f"optimizer.groups.{pattern}.{option}", message, value)
    declared = OPTIMIZERS.facts(config.name)
    for ndim, one in chosen.items():
        shape = tuple(range(2, 2 + ndim))
        if declared.states is not None:
            found = {state.name: state.shape(shape) for state in tried[ndim].states}
            said = {name: state.shape(shape) for name, state in states_of(one, shape).items()}
            if found != said:
                message = (
                    f"it is registered with states {_listed(said)}, and keeps {_listed(found)} of "
                    f"a parameter of shape {list(shape)}; register it with states of these shapes"
                )
                yield ConfigIssue("optimizer.name", message, config.name)
        if declared.sharding == "elementwise" and tried[ndim].sharding != "elementwise":
            message = (
                "it is registered as elementwise, and updates halves of a parameter of shape "
                f"{list(shape)} otherwise than the whole; register it with sharding='whole'"
            )
            yield ConfigIssue("optimizer.name", message, config.name)


def _listed(states: dict[str, Any]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(states.items())) or "none"
