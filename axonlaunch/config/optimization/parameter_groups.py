"""Selects the optimizer options of each parameter, and counts the bytes of optimizer states.

The options of a parameter group apply to parameters with names that match its pattern.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from axonlaunch.config.optimization.optimizer import (
    OPTIMIZERS,
    FreeOptimizerConfig,
    GroupedOptimizer,
)
from axonlaunch.config.optimization.optimizer_states import OptimizerState, ParameterFacts, Sharding
from axonlaunch.config.precision import master_format, quantizes_states, state_format
from axonlaunch.config.problems.did_you_mean import nearest
from axonlaunch.config.problems.errors import ConfigIssue
from axonlaunch.config.values.optional_keys import custom_arguments, optimizer_groups
from axonlaunch.system.processes.targets import load_target

LR_SCALE = "lr_scale"
NOT_OF_A_GROUP = ("name", "groups", "master_weights", "state_dtype", "target", "arguments")
"""Fields of an optimizer's configuration that a parameter group can't set."""
_PROBE = "axonlaunch.engines.optimizer.probe:probe"
_PROBE_STATES = "axonlaunch.engines.optimizer.probe:probe_states"
_LISTED = 4


def with_options(config: Any, parameter: ParameterFacts) -> Any:
    """Return the configuration, without groups, that updates one parameter.

    With ``{"*.bias": {lr: 1e-3}, "head.*": {lr: 1e-4}}``, head.bias has lr 1e-4, because the last
    matching pattern has priority. Only matrices have weight decay, unless a group sets it.
    """
    options: dict[str, Any] = {}
    for pattern, group_options in optimizer_groups(config).items():
        if fnmatchcase(parameter.name, pattern):
            options |= group_options
    scale = options.pop(LR_SCALE, 1.0)
    has_decay = hasattr(config, "weight_decay") or "weight_decay" in custom_arguments(config)
    if len(parameter.shape) < 2 and has_decay:
        options.setdefault("weight_decay", 0.0)
    chosen = _replaced(config, options)
    if isinstance(chosen, GroupedOptimizer):
        chosen = chosen.for_parameter(parameter, options)
    return chosen if scale == 1 else dataclasses.replace(chosen, lr=scale * chosen.lr)


def _replaced(config: Any, options: dict[str, Any]) -> Any:
    """Return a configuration with changed options (arguments if it is free) and no groups."""
    values: dict[str, Any] = {"groups": {}} if hasattr(config, "groups") else {}
    if isinstance(config, FreeOptimizerConfig):
        arguments = {key: value for key, value in options.items() if key != "lr"}
        values["arguments"] = {**config.arguments, **arguments}
        options = {key: value for key, value in options.items() if key == "lr"}
    return dataclasses.replace(config, **values, **options)


def options_of(config: Any) -> dict[str, Any]:
    """Return the keyword arguments of an optimizer's class, without the parameters."""
    options = {
        spec.name: getattr(config, spec.name)
        for spec in dataclasses.fields(config)
        if spec.name not in NOT_OF_A_GROUP and not spec.metadata.get("not_an_argument")
    }
    return {**options, **custom_arguments(config)}


def states_of(config: Any, shape: tuple[int, ...]) -> dict[str, OptimizerState]:
    """Return the optimizer states of a parameter, by name.

    Args:
        config: Configuration that updates the parameter, as returned by ``with_options``.
        shape: Shape of the full parameter.
    """
    declared = OPTIMIZERS.facts(config.name).states
    states = load_target(_PROBE_STATES)(config, tuple(shape)) if declared is None else declared
    if quantizes_states(config):
        states = tuple(state.in_blocks(tuple(shape)) for state in states)
    return {
        state.name: state
        for state in states
        if state.shape(shape) is not None
        and (state.absent_at_zero is None or getattr(config, state.absent_at_zero) != 0)
    }


def sharding_of(config: Any) -> Sharding:
    """Return how an optimizer supports parameters that are divided among ranks."""
    declared = OPTIMIZERS.facts(config.name).sharding
    if declared is not None:
        return declared
    sharding: Sharding = load_target(_PROBE)(config, 2).sharding
    return sharding


def state_bytes(
    config: Any, parameters: Iterable[ParameterFacts], *, parameter_bytes: int = 4
) -> int:
    """Return the bytes of the optimizer states of full parameters, and of their masters.

    Args:
        config: Optimizer configuration of the run.
        parameters: Parameters that are updated.
        parameter_bytes: Bytes per element of the parameters.
    """
    chosen, masters = state_format(config), master_format(config)
    element = chosen.nbytes if chosen is not None else parameter_bytes
    master = 0 if masters is None else masters.nbytes
    return sum(
        master * math.prod(parameter.shape)
        + sum(
            state.nbytes(parameter.shape, element=element)
            for state in states_of(with_options(config, parameter), parameter.shape).values()
        )
        for parameter in parameters
    )


def group_problems(config: Any, parameters: Iterable[ParameterFacts]) -> Iterator[ConfigIssue]:
    """Yield patterns that match no parameter, and parameters that a group's options don't suit."""
    parameters = list(parameters)
    names = [parameter.name for parameter in parameters]
    for pattern, options in optimizer_groups(config).items():
        key = f"optimizer.groups.{pattern}"
        matched = [candidate for candidate in parameters if fnmatchcase(candidate.name, pattern)]
        if not matched:
            message = f"matches no parameter that is trained{explain_unmatched(pattern, names)}"
            yield ConfigIssue(key, message)
        flat = [
            candidate.name
            for candidate in matched
            if len(candidate.shape) != 2 and not candidate.is_hidden_matrix
        ]
        if options.get("algorithm") == "muon" and flat:
            message = f"Muon is for matrices, and {flat[0]} is none; use adamw, or another pattern"
            yield ConfigIssue(f"{key}.algorithm", message, "muon")
    if config.name == "muon":
        chosen = [with_options(config, candidate) for candidate in parameters]
        if not any(candidate.name == "muon" for candidate in chosen):
            message = (
                "the model has no repeated blocks whose matrices Muon would update (model.layers); "
                "name them, as in optimizer.groups={'*.weight':{algorithm:muon}}, or use adamw"
            )
            yield ConfigIssue("optimizer.name", message, "muon")


def explain_unmatched(pattern: str, names: list[str]) -> str:
    """Return a suggestion for a pattern that matches no name, and some of the names."""
    patterns = {
        part
        for name in names
        for cut in range(1, name.count(".") + 1)
        for part in (f"*.{name.split('.', cut)[-1]}", f"{name.rsplit('.', cut)[0]}.*")
    }
    meant = nearest(pattern, [*names, *sorted(patterns)])
    hint = f"; did you mean {meant}?" if meant else ";"
    some = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
    return f"{hint} names are {some}"
