"""Checks whether an optimizer can update a model in a layout and matches its registration.

Optimizers of users and plug-ins are run on small parameters. The properties of included optimizers
are declared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.optimization.optimizer import (
    INCLUDED_OPTIMIZERS,
    OPTIMIZERS,
    FreeOptimizerConfig,
)
from axonlaunch.config.optimization.optimizer_states import ParameterFacts, Sharding
from axonlaunch.config.optimization.parameter_groups import (
    LR_SCALE,
    group_problems,
    sharding_of,
    states_of,
    with_options,
)
from axonlaunch.config.precision import (
    NUMBER_FORMATS,
    master_format,
    quantizes_states,
    state_format,
)
from axonlaunch.config.problems.did_you_mean import unknown
from axonlaunch.config.values.optional_keys import custom_target
from axonlaunch.engines.optimizer.probe import probe
from axonlaunch.engines.optimizer.schedules import schedule_issues
from axonlaunch.models.facts.parameter_facts import parameter_facts
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.models.tensors.packed_blocks import library_problem

_MATRIX = (64, 64)
"""Shape of a small parameter whose states are converted if any are."""


def optimizer_problems(config: RunConfig, spec: ModelSpec, model: nn.Module) -> list[ConfigIssue]:
    """Return the reasons why a run's optimizer can't update its model.

    Args:
        config: Configuration with resolved ``launch.nproc``.
        spec: Specification of the model.
        model: Complete model, on the meta device or not.
    """
    facts = [*parameter_facts(spec, model).values()]
    problems = rate_problems(config)
    problems += group_problems(config.optimizer, facts)
    if problems:
        return problems
    try:
        if config.optimizer.name not in INCLUDED_OPTIMIZERS:
            problems += _registration_problems(config.optimizer, facts)
        if not problems:
            problems += layout_problems(config, Layout.of(config, world_size=num_ranks(config)))
    except ConfigError as error:
        return error.problems
    return problems


def rate_problems(config: RunConfig) -> list[ConfigIssue]:
    """Return the problems of a user's schedule; none while the number of steps is unknown."""
    steps = config.train.steps
    return [] if steps == "auto" else schedule_issues(config.scheduler, steps=steps)


def layout_problems(config: RunConfig, layout: Layout) -> Iterator[ConfigIssue]:
    """Yield problems of layouts that divide or offload parameters in a way the optimizer forbids.

    Raises:
        ConfigError: A custom optimizer can't be run on small parameters.
    """
    needs, divided = sharding_of(config.optimizer), []
    if layout.optimizer_shards > 1:
        divided.append(layout.data_parallel)
    if layout.tensor > 1:
        divided.append("tensor parallelism")
    name = config.optimizer.name
    if quantizes_states(config.optimizer) and (message := library_problem()):
        yield ConfigIssue("optimizer.state_dtype", message, config.optimizer.state_dtype)
    if needs == "whole" and divided:
        message = (
            "it needs all elements of a parameter to update one of them, and "
            f"{' and '.join(divided)} leave{'s' if len(divided) == 1 else ''} each rank a part; "
            "use strategy=single, ddp or pipeline"
        )
        target = custom_target(config.optimizer)
        key, value = ("optimizer.target", target) if target else ("optimizer.name", name)
        yield ConfigIssue(key, message, value)
    yield from _conversion_problems(config, needs)
    if config.train.optimizer_in_backward and (
        needs == "whole" or (needs != "elementwise" and divided)
    ):
        message = (
            f"optimizer={name} may use several parameters, or ranks, in the update of one; use "
            "false, or adamw"
        )
        yield ConfigIssue("train.optimizer_in_backward", message, True)
    offload = config.strategy.fsdp.cpu_offload
    if needs == "collective" and layout.facts.shards_parameters and offload != "none":
        message = (
            f"optimizer={name} exchanges parts of parameters among ranks during the update, and "
            "offloaded ones are never on the device together; use none, or adamw"
        )
        yield ConfigIssue("strategy.fsdp.cpu_offload", message, offload)


def _conversion_problems(config: RunConfig, needs: Sharding) -> Iterator[ConfigIssue]:
    """Yield a problem if the optimizer can't update in fp32 or can't round its states."""
    optimizer, name = config.optimizer, config.optimizer.name
    state, masters = state_format(optimizer), master_format(optimizer)
    is_smaller = quantizes_states(optimizer) or (state is not None and state.is_low)
    is_other = state is not None and state != NUMBER_FORMATS[config.train.param_dtype]
    if not (is_smaller or is_other or masters is not None):
        return
    chosen = with_options(optimizer, ParameterFacts(name="", shape=_MATRIX))
    problem = ""
    if needs != "elementwise" and is_smaller:
        message = (
            f"optimizer={name} updates full matrices, and only the states of updates of single "
            "elements are rounded; use parameter, or adamw"
        )
        yield ConfigIssue("optimizer.state_dtype", message, optimizer.state_dtype)
        return
    if chosen.name not in INCLUDED_OPTIMIZERS and probe(chosen, len(_MATRIX)).begins_with_states:
        problem = "creates states before its first step, in the dtype of the weights"
    if problem and masters is not None:
        message = f"optimizer={name} {problem}; use null, or adamw"
        yield ConfigIssue("optimizer.master_weights", message, masters.name)
        return
    states = [] if problem else states_of(chosen, _MATRIX).values()
    converted = [s for s in states if s.is_packed or s.dtype == "parameter"]
    if quantizes_states(optimizer):
        converted = [s for s in converted if s.is_packed]
    if not problem and is_smaller and not converted:
        problem = "keeps no states in the dtype of the weights, which could be converted"
    if problem:
        message = f"optimizer={name} {problem}; use parameter, or adamw"
        yield ConfigIssue("optimizer.state_dtype", message, optimizer.state_dtype)


def _registration_problems(config: Any, facts: list[ParameterFacts]) -> Iterator[ConfigIssue]:
    """Run a custom optimizer and yield differences from its registration and unknown options.

    Raises:
        ConfigError: The optimizer can't be built, fails, or has states that a checkpoint can't
            save.
    """
    if unknown_options := list(_unknown_options(config, facts)):
        yield from unknown_options
        return
    declared = OPTIMIZERS.facts(config.name)
    for options, ndim in _different(config, facts):
        tried, shape = probe(options, ndim), tuple(range(2, 2 + ndim))
        if declared.states is not None:
            shapes = {state.name: state.shape(shape) for state in tried.states}
            registered = {
                name: state.shape(shape) for name, state in states_of(options, shape).items()
            }
            if shapes != registered:
                message = (
                    f"it is registered with states {_list_states(registered)}, but has "
                    f"{_list_states(shapes)} for a parameter of shape {list(shape)}; register it "
                    "with states of these shapes"
                )
                yield ConfigIssue("optimizer.name", message, config.name)
                return
        if declared.sharding == "elementwise" and tried.sharding != "elementwise":
            message = (
                f"it is registered as elementwise, but updates halves of a parameter of {ndim} "
                "dims differently from the full parameter; register it with sharding='whole'"
            )
            yield ConfigIssue("optimizer.name", message, config.name)
            return


def _different(config: Any, facts: list[ParameterFacts]) -> Iterator[tuple[Any, int]]:
    """Yield each distinct pair of optimizer options and number of parameter dims."""
    yielded = set()
    for parameter in facts:
        options, ndim = with_options(config, parameter), len(parameter.shape)
        if (repr(options), ndim) not in yielded:
            yielded.add((repr(options), ndim))
            yield options, ndim


def _unknown_options(config: Any, facts: list[ParameterFacts]) -> Iterator[ConfigIssue]:
    """Yield a problem for each group option that the class of a custom optimizer does not have."""
    if not isinstance(config, FreeOptimizerConfig) or not config.groups:
        return
    without_groups = dataclasses.replace(config, groups={})
    allowed = {LR_SCALE, *probe(without_groups, len(facts[0].shape)).defaults}
    for pattern, options in config.groups.items():
        for option, value in options.items():
            if option not in allowed:
                message = unknown("option of a group", option, sorted(allowed))
                yield ConfigIssue(f"optimizer.groups.{pattern}.{option}", message, value)


def _list_states(states: dict[str, Any]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(states.items())) or "none"
