"""Describes a model for parallelism: blocks, split points, tied weights, plan and legal layouts.

The model is built on the meta device, without storage.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.config.axes import AXES
from axonlaunch.config.consistency.degree_rules import EXPERT_DEGREE
from axonlaunch.config.problems.errors import one_of
from axonlaunch.engines.pipeline.split import ends_of
from axonlaunch.engines.pipeline.tied_weights import tied_names
from axonlaunch.engines.tensor.plan_checks import plan_issues
from axonlaunch.models.build import spec_for
from axonlaunch.models.source_of import source_of
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.models.tensors.packed_blocks import logical_numel
from axonlaunch.preflight.checks import build_on_meta, fetch_model
from axonlaunch.preflight.parallelism import AXIS_PROBLEMS, expert_degrees, sharding_problems

_DEGREE = 2
"""Degree with which an axis is checked."""
_TENSOR_DEGREES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 32, 64)
"""Tensor degrees to check. The number of heads and the widths of a model allow some of them."""


@dataclass(frozen=True)
class LayoutAnswer:
    """States whether a layout is legal for a model.

    Attributes:
        layout: Layout as overrides.
        legal: Whether the layout is legal.
        reason: Reason why it is not legal; empty if it is.
    """

    layout: str
    legal: bool
    reason: str = ""


@dataclass(frozen=True)
class InspectedExperts:
    """Mixture-of-experts layers with the same name and size in several blocks.

    Attributes:
        modules: Name of the modules that hold the experts, with ``*`` for the number of the block.
        count: Number of these modules.
        num_experts: Number of experts in each module.
        router: Name of the modules that choose experts; empty if unknown.
        shared: Names of the shared experts, modules that every token passes through.
        degrees: Values of ``strategy.expert.degree`` that divide the experts.
    """

    modules: str
    count: int
    num_experts: int
    router: str
    shared: list[str]
    degrees: list[int]


@dataclass(frozen=True)
class Inspection:
    """A model's structure.

    Attributes:
        model: Class name of the model.
        parameters: Number of elements of all parameters, tied ones counted once.
        layers: Path of the list of blocks; None if there is no such list.
        blocks: Number of blocks by class name, in order of first occurrence.
        cut_points: Names of blocks before which a pipeline may cut.
        first: Names of modules only in the first stage, except blocks.
        last: Names of modules only in the last stage, except blocks.
        ties: Tied weights as ``{other name: first name}``.
        tensor_plan: Tensor plan as ``{pattern: style}``: that of the model, otherwise the one
            that the model's library includes.
        experts: Modules of experts, by name.
        layouts: Checked layouts.
        notes: Properties that could not be determined, with the reason.
    """

    model: str
    parameters: int
    layers: str | None
    blocks: dict[str, int]
    cut_points: list[str]
    first: list[str]
    last: list[str]
    ties: dict[str, str]
    tensor_plan: dict[str, str]
    experts: list[InspectedExperts]
    layouts: list[LayoutAnswer]
    notes: list[str]


def inspect(config: RunConfig) -> Inspection:
    """Inspect the model of a configuration.

    Raises:
        ConfigError: The model can't be built.
    """
    if problems := fetch_model(config, here=False):
        raise ConfigError(problems)
    spec, source = spec_for(config), source_of(config)
    model = build_on_meta(config, spec)
    blocks = spec.blocks(model)
    first, last = ends_of(spec)
    uncut = spec.flow().problem if spec.flow is not None else ""
    return Inspection(
        model=type(model).__name__,
        parameters=sum(logical_numel(parameter) for parameter in model.parameters()),
        layers=spec.layers,
        blocks=dict(Counter(source.block_kinds(blocks.values()))),
        cut_points=list(blocks)[1:],
        first=list(first),
        last=list(last),
        ties=tied_names(model),
        tensor_plan=spec.plan(model) or source.published_plan(),
        experts=_experts(spec, model),
        layouts=list(_layouts(config, spec, model)),
        notes=[uncut] if uncut else [],
    )


def _experts(spec: ModelSpec, model: nn.Module) -> list[InspectedExperts]:
    """Return the modules of experts, with those that choose experts and those beside them."""
    alike: Counter[tuple[str, int, str, tuple[str, ...]]] = Counter()
    blocks = spec.blocks(model)
    for name in spec.experts(model):
        module: Any = model.get_submodule(name)
        parent = name.rpartition(".")[0]
        beside = [other for other, _ in model.get_submodule(parent).named_children()]
        routers = [other for other in beside if other == "gate" or "router" in other]
        block = next((block for block in blocks if name.startswith(f"{block}.")), parent)
        shared = [
            f"{block}.{other}"
            for other, _ in model.get_submodule(block).named_modules()
            if "shared" in (last := other.rpartition(".")[2]) and "gate" not in last
        ]
        router = f"{parent}.{routers[0]}" if routers else ""
        key = (_pattern(name), module.num_experts, _pattern(router), tuple(map(_pattern, shared)))
        alike[key] += 1
    degrees = expert_degrees(spec, model)
    return [
        InspectedExperts(modules, count, num_experts, router, [*shared], degrees)
        for (modules, num_experts, router, shared), count in alike.items()
    ]


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _layouts(config: RunConfig, spec: ModelSpec, model: nn.Module) -> Iterator[LayoutAnswer]:
    for kind in ("ddp", "zero1", "fsdp"):
        changed = with_values(config, {"strategy.data_parallel": kind})
        yield _answer(f"strategy={kind}", sharding_problems(changed, spec, model))
    tensor = _tensor_degrees(config, spec, model) or [_DEGREE]
    for axis in AXES:
        degrees = tensor if axis.divides == "layers" else [_DEGREE]
        changed = with_values(config, {axis.key: degrees[0]})
        problems = AXIS_PROBLEMS[axis.name](changed, spec, model)
        yield _answer(f"{axis.key}={one_of(degrees)}", problems)
        if axis.divides == "layers" and (config.strategy.tensor.plan or spec.plan(model)):
            reason = spec.no_sequence_parallelism()
            yield LayoutAnswer("strategy.tensor.sequence_parallel=true", not reason, reason)
    if experts := expert_degrees(spec, model)[1:]:
        yield _answer(f"{EXPERT_DEGREE}={one_of(experts)}", [])


def _answer(layout: str, problems: Iterable[ConfigIssue]) -> LayoutAnswer:
    reasons = [problem.message for problem in problems]
    return LayoutAnswer(layout, not reasons, "; ".join(reasons))


def _tensor_degrees(config: RunConfig, spec: ModelSpec, model: nn.Module) -> list[int]:
    """Return the degrees that divide the sizes of all modules in the plan."""
    plan = config.strategy.tensor.plan or spec.plan(model)
    return [
        degree
        for degree in _TENSOR_DEGREES
        if plan and not plan_issues(model, plan, degree=degree, sequence_parallel=False)
    ]
