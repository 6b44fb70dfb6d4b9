"""Where two runs part: their module traces side by side, in order of computation.

It compares whole tensors, which every layout writes alike: by their statistics, without torch, and
where both runs wrote them by all elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from axonlaunch.config.did_you_mean import nearest
from axonlaunch.config.precision import NUMBER_FORMATS, PrecisionName, lowest_format
from axonlaunch.diagnostics.module_trace.elements import DifferentElements, ElementsOfStep
from axonlaunch.diagnostics.module_trace.files import StepTrace, TracedTensor

_OF_LARGEST = 4.0
"""By how much more the largest element may be off: it rounds alone, a mean of many does not."""
_MOST = {False: 1e-2, True: 0.5}
"""What rounding is said to make of a tensor at most, however many updates there were."""
_LEAST_IN_BOTH = 0.5
"""Of the larger model's parameters: what both must have, by name, to be the same model."""
_FACTOR = 1e-2
"""How alike the ratios of root mean square and largest element are where all is a factor."""


@dataclass(frozen=True, kw_only=True)
class TraceTolerance:
    """What rounding explains.

    Attributes:
        gradient_floor: Part of the model's usual gradient that one is judged beside which is far
            smaller.
        parameter_floor: Size that a parameter is at least judged beside.
    """

    gradient_floor: float
    parameter_floor: float

    def of(self, arithmetics: Sequence[PrecisionName], *, step: int) -> float:
        """Return the largest relative difference of a step that passes.

        Args:
            arithmetics: Of both sides; the coarser one counts.
            step: Updates before it, each of which rounds: it grows with them.
        """
        coarser = lowest_format(NUMBER_FORMATS[name] for name in arithmetics)
        # Rounding to bf16 and fp16 is seen in single gradients of small modules, twice the base in
        # tiny models, and all of it where one side does not round so: units of ReLU flip.
        times = 2 * len(set(arithmetics)) if coarser.is_low else 1
        return min(times * coarser.tolerance * (1 + step), _MOST[coarser.is_low])


@dataclass(frozen=True)
class TracedDifference:
    """A tensor that is not the same in both runs.

    Attributes:
        step: Of the runs.
        ours: In the first run.
        theirs: In the second.
        relative: How far root mean square, mean or largest element are apart, at most.
        ratio: The first run's size in the second's, where all that differs is a factor.
        elements: Which elements, where both runs wrote them.
    """

    step: int
    ours: TracedTensor
    theirs: TracedTensor
    relative: float
    ratio: float | None = None
    elements: DifferentElements | None = None

    @property
    def module(self) -> str:
        """The module that it is of; empty for the batch and the loss."""
        kind, name = self.ours.kind, self.ours.name
        if kind in ("batch", "loss"):
            return ""
        return name if kind.startswith("output") else name.rpartition(".")[0] or name


@dataclass
class TraceComparison:
    """Two runs side by side.

    Attributes:
        steps: Traced by both, each with the largest relative difference that passes.
        compared: Tensors, over all steps.
        by_element: Those of them of which all elements were compared.
        differences: In order of computation.
        only: Names of modules and parameters that one run alone traced, for each run.
    """

    steps: dict[int, float] = field(default_factory=dict)
    compared: int = 0
    by_element: int = 0
    differences: list[TracedDifference] = field(default_factory=list)
    only: tuple[list[str], list[str]] = ([], [])


class TracesIncomparableError(Exception):
    """Two traces have nothing that could be compared; the text says why."""


def compare_traces(
    ours: Mapping[int, StepTrace],
    theirs: Mapping[int, StepTrace],
    *,
    tolerance: TraceTolerance,
    elements: Mapping[int, ElementsOfStep] | None = None,
) -> TraceComparison:
    """Compare what two runs traced, step by step.

    Args:
        ours: The first run's steps.
        theirs: The second's.
        tolerance: What passes.
        elements: Of the steps of which both wrote all.

    Raises:
        TracesIncomparableError: No step is in both, or they are of different models.
    """
    steps = [step for step in ours if step in theirs]
    if not steps:
        raise TracesIncomparableError(
            f"no step is in both: one has {_list_steps(ours)}, the other {_list_steps(theirs)}; "
            "trace the same steps with train.trace.steps"
        )
    _refuse_other_models(ours[steps[0]], theirs[steps[0]])
    comparison = TraceComparison()
    for step in steps:
        one, other = ours[step], theirs[step]
        passing = tolerance.of((one.arithmetic, other.arithmetic), step=step)
        comparison.steps[step] = passing
        by_key = {(tensor.kind, tensor.name): tensor for tensor in other.tensors}
        floors = _floors(one, tolerance)
        wandering = _wandering(one, passing) | _wandering(other, passing)
        for tensor in one.tensors:
            beside = by_key.get((tensor.kind, tensor.name))
            if beside is None or (tensor.kind, tensor.name) in wandering:
                continue
            comparison.compared += 1
            floor = floors.get(tensor.kind, 0.0)
            relative, different = _relative(tensor, beside, floor=floor), None
            if elements is not None and step in elements:
                different = elements[step].compare(
                    tensor.kind, tensor.name, floor=floor, passing=passing
                )
            if different is not None:
                comparison.by_element += 1
                relative = max(relative, different.relative)
            if not relative <= passing:
                ratio = _factor(tensor, beside)
                comparison.differences.append(
                    TracedDifference(step, tensor, beside, relative, ratio, different)
                )
    mine, others = (_names(side[steps[0]]) for side in (ours, theirs))
    comparison.only = ([*(mine - others)], [*(others - mine)])
    comparison.only[0].sort()
    comparison.only[1].sort()
    return comparison


def describe_difference(difference: TracedDifference, names: tuple[str, str]) -> str:
    """Say what differs, and by which factor if it is one.

    Args:
        difference: One tensor's.
        names: Of the two runs.
    """
    ours, theirs = difference.ours, difference.theirs
    what = {
        "batch": f"the batch ({ours.name})",
        "loss": "the loss",
        "parameter": f"the parameter {ours.name}",
        "output": "its output",
        "output gradient": "the gradient of its output",
        "gradient": f"the gradient of {ours.name}",
    }[ours.kind]
    if ours.rms is None or theirs.rms is None:
        which = [
            name for name, tensor in zip(names, (ours, theirs), strict=True) if tensor.rms is None
        ]
        return f"{what} is not finite in {' and '.join(which)}"
    first = _first_element(difference, names)
    if difference.ratio is None:
        return f"{what} is off by {difference.relative:.2g} of its size{first}"
    digits = 2 if abs(difference.ratio - 1) > 0.1 else 3
    times = f"{difference.ratio:.{digits}f} times"
    return f"{what} is {times} as large in {names[0]} as in {names[1]}{first}"


def _first_element(difference: TracedDifference, names: tuple[str, str]) -> str:
    """Say which element is the first that differs, and how many do."""
    elements = difference.elements
    if elements is None or elements.index is None:
        return ""
    values = (f"{v:.7g} in {name}" for v, name in zip(elements.values, names, strict=True))
    return (
        f", first at {[*elements.index]}: {', '.join(values)} "
        f"({elements.count:,} of {elements.total:,} elements)"
    )


def likely_cause(
    difference: TracedDifference,
    names: tuple[str, str],
    traces: Sequence[StepTrace],
    *,
    steps: Sequence[int],
) -> str:
    """Say why the first tensor differs that does, where that is known; else nothing.

    Args:
        difference: That tensor's.
        names: Of the two runs.
        traces: Of its step, of both.
        steps: That both traced.
    """
    if difference.ours.kind == "batch":
        return "for they were given other samples (data, seed or global batch size)"
    if difference.ours.kind == "parameter":
        before = [step for step in steps if step < difference.step]
        if not difference.step:
            return "for they start from other weights"
        if before and before[-1] == difference.step - 1:
            return f"for the update of step {before[-1]} was another one"
        since = f"since step {before[-1]}" if before else "before it"
        return f"for an update {since} was another one; trace those steps too"
    return _axis_as_long(difference, names, traces)


def last_same(first: TracedDifference, trace: StepTrace) -> str:
    """Return the module whose output's gradient was the same before the first that is not.

    What is wrong lies between the two: of residual connections several modules may.

    Args:
        first: The first difference of its step.
        trace: Of one of the runs, of that step.
    """
    if first.ours.kind != "output gradient":
        return ""
    names = [tensor.name for tensor in trace.tensors if tensor.kind == "output gradient"]
    place = names.index(first.ours.name)
    return names[place - 1] if place else ""


def _axis_as_long(
    difference: TracedDifference, names: tuple[str, str], traces: Sequence[StepTrace]
) -> str:
    """Say which axis of a run is as long as one is larger than the other; empty where none is."""
    if difference.ratio is None:
        return ""
    factors = (difference.ratio, 1 / difference.ratio)
    for name, trace, factor in zip(names, traces, factors, strict=True):
        for axis, size in trace.axes.items():
            if abs(factor - size) < _FACTOR * size:
                return f"as if {name} summed once too often over {axis}"
            if abs(factor - 1 / size) < _FACTOR / size:
                return f"as if {name} did not sum, or averaged twice, over {axis}"
    return ""


def _relative(ours: TracedTensor, theirs: TracedTensor, *, floor: float) -> float:
    """Return how far two tensors are apart: 0 the same, infinite where one is not finite."""
    values = (ours.rms, ours.mean, ours.absmax, theirs.rms, theirs.mean, theirs.absmax)
    if any(value is None for value in values):
        same = (ours.rms is None) and (theirs.rms is None)
        return 0.0 if same else math.inf
    rms, mean, absmax, other_rms, other_mean, other_absmax = (value or 0.0 for value in values)
    size = max(rms, other_rms) + floor
    largest = max(absmax, other_absmax) + floor
    if not largest:
        return 0.0
    of_largest = abs(absmax - other_absmax) / largest / _OF_LARGEST
    return max(abs(rms - other_rms) / size, abs(mean - other_mean) / size, of_largest)


def _factor(ours: TracedTensor, theirs: TracedTensor) -> float | None:
    """Return by what factor a tensor is larger, where nothing else differs."""
    if not (ours.rms and theirs.rms and ours.absmax and theirs.absmax):
        return None
    ratio, of_largest = ours.rms / theirs.rms, ours.absmax / theirs.absmax
    # Of what is hardly larger any two tensors that are off by little would be a factor apart.
    within = _FACTOR * min(1.0, max(abs(ratio - 1), abs(1 / ratio - 1)))
    mean_as_expected = abs((ours.mean or 0.0) - ratio * (theirs.mean or 0.0)) < within * ours.rms
    is_one = abs(of_largest / ratio - 1) < within and mean_as_expected
    return ratio if is_one and abs(ratio - 1) > _FACTOR / 10 else None


def _floors(trace: StepTrace, tolerance: TraceTolerance) -> dict[str, float]:
    """Return the floor of each kind of tensor."""
    floors = {"parameter": tolerance.parameter_floor}
    for kind in ("output gradient", "gradient"):
        floors[kind] = tolerance.gradient_floor * _usual(trace, kind)
    return floors


def _wandering(trace: StepTrace, passing: float) -> set[tuple[str, str]]:
    """Return the parameters, and outputs of modules that have them, that say nothing of a step.

    A gradient that is nothing but rounding, as of the bias of keys, which softmax ignores, is made
    whole updates of by AdamW, in directions of its own in each run.
    """
    if not trace.step:
        return set()
    least = passing * _usual(trace, "gradient")
    names = [
        tensor.name
        for tensor in trace.tensors
        if tensor.kind == "gradient" and tensor.rms is not None and tensor.rms < least
    ]
    owners = {("output", name.rpartition(".")[0]) for name in names}
    return {("parameter", name) for name in names} | owners


def _usual(trace: StepTrace, kind: str) -> float:
    """Return the root mean square of the sizes of all tensors of a kind."""
    sizes = [tensor.rms or 0.0 for tensor in trace.tensors if tensor.kind == kind]
    return math.sqrt(sum(size * size for size in sizes) / max(1, len(sizes)))


def _names(trace: StepTrace) -> set[str]:
    return {tensor.name for tensor in trace.tensors if tensor.name and tensor.kind != "batch"}


def _refuse_other_models(ours: StepTrace, theirs: StepTrace) -> None:
    """Refuse models whose parameters are not the same.

    Raises:
        TracesIncomparableError: They are others by name, or of other sizes.
    """
    mine, others = (
        {tensor.name: tensor.size for tensor in trace.tensors if tensor.kind == "parameter"}
        for trace in (ours, theirs)
    )
    both = [name for name in mine if name in others]
    if len(both) < _LEAST_IN_BOTH * max(len(mine), len(others)) or not both:
        near = "; ".join(_near(mine, others))
        raise TracesIncomparableError(
            f"these are different models: of {len(mine)} parameters in one and {len(others)} in "
            f"the other {len(both)} have the same name{f' ({near})' if near else ''}"
        )
    for name in both:
        if mine[name] != others[name]:
            raise TracesIncomparableError(
                f"these are different models: {name} has {mine[name]:,} elements in one and "
                f"{others[name]:,} in the other"
            )


def _near(mine: Mapping[str, int | None], others: Mapping[str, int | None]) -> Iterator[str]:
    """Yield some names that nearly match."""
    left = [name for name in others if name not in mine]
    shown = 0
    for name in mine:
        if shown < 3 and name not in others and (like := nearest(name, left)):
            shown += 1
            yield f"{name} and {like}"


def _list_steps(steps: Mapping[int, StepTrace]) -> str:
    return ", ".join(map(str, steps)) or "none"
