"""What a model looks like to parallelism: blocks, cuts, ties, plans, and which layouts are legal.

It builds the model without storage and starts nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.config.axes import AXES
from axonlaunch.config.errors import one_of
from axonlaunch.config.model import HuggingFaceConfig
from axonlaunch.engines.pipeline.split import ends_of
from axonlaunch.engines.pipeline.tied_weights import tied_names
from axonlaunch.engines.tensor.plan_checks import plan_issues
from axonlaunch.models.build import spec_for
from axonlaunch.models.spec import ModelSpec
from axonlaunch.preflight.checks import build_on_meta, fetch_model
from axonlaunch.preflight.parallelism import AXIS_PROBLEMS, sharding_problems

_DEGREE = 2
"""Of an axis when it is asked whether the model can be divided over it."""
_TENSOR_DEGREES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 32, 64)
"""Of the tensor axis: heads and widths may allow some of them."""


@dataclass(frozen=True)
class LayoutAnswer:
    """Whether a layout is legal for a model.

    Attributes:
        layout: As overrides.
        legal: Whether it is.
        reason: Why not; empty if it is.
    """

    layout: str
    legal: bool
    reason: str = ""


@dataclass(frozen=True)
class Inspection:
    """A model's structure.

    Attributes:
        model: Its class.
        parameters: How many numbers they hold, tied ones once.
        layers: Path of the list of blocks; None: there is none.
        blocks: ``{kind: count}``, in the order in which kinds first occur.
        cut_points: Blocks before which a pipeline may cut.
        first: Modules of the first stage alone, beside blocks.
        last: Modules of the last stage alone.
        ties: ``{other name: first name}`` of weights that are held twice.
        tensor_plan: ``{pattern: style}``: the model's own, and transformers' where that is all.
        layouts: Which can be used.
        notes: What could not be determined, and why.
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
    layouts: list[LayoutAnswer]
    notes: list[str]


def inspect(config: RunConfig) -> Inspection:
    """Look at the model of a configuration.

    Raises:
        ConfigError: It can't be built.
    """
    if problems := fetch_model(config, here=False):
        raise ConfigError(problems)
    spec = spec_for(config)
    model = build_on_meta(config, spec)
    blocks = spec.blocks(model)
    kinds = [type(block).__name__ for block in blocks.values()]
    first, last = ends_of(spec)
    plan, notes = spec.plan(model), []
    if isinstance(config.model, HuggingFaceConfig):
        from axonlaunch.models.hf.structure import structure

        structure_of_model = structure(config.model)
        kinds, plan = list(structure_of_model.kinds), plan or dict(structure_of_model.tensor_plan)
        notes = [
            text for text in (structure_of_model.no_layers, structure_of_model.flow.problem) if text
        ]
    return Inspection(
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=spec.layers,
        blocks=dict(Counter(kinds)),
        cut_points=list(blocks)[1:],
        first=list(first),
        last=list(last),
        ties=tied_names(model),
        tensor_plan=plan,
        layouts=list(_layouts(config, spec, model)),
        notes=list(dict.fromkeys(notes)),
    )


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


def _answer(layout: str, problems: Iterable[ConfigIssue]) -> LayoutAnswer:
    reasons = [problem.message for problem in problems]
    return LayoutAnswer(layout, not reasons, "; ".join(reasons))


def _tensor_degrees(config: RunConfig, spec: ModelSpec, model: nn.Module) -> list[int]:
    """Return the degrees that the sizes of what the plan divides allow."""
    plan = config.strategy.tensor.plan or spec.plan(model)
    return [
        degree
        for degree in _TENSOR_DEGREES
        if plan and not plan_issues(model, plan, degree=degree, sequence_parallel=False)
    ]
