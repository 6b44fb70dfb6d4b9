"""Compares the module traces of two runs in order of computation.

Traces contain full tensors, so that runs of different layouts can be compared: by statistics,
without importing torch, or element by element if both runs wrote all elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from axonlaunch.config.precision import NUMBER_FORMATS, PrecisionName, lowest_format
from axonlaunch.config.problems.did_you_mean import nearest
from axonlaunch.diagnostics.module_trace.element_comparison import DifferentElements, ElementsOfStep
from axonlaunch.diagnostics.module_trace.files import StepTrace, TracedTensor

_OF_LARGEST = 4.0
"""Factor on the tolerance of the largest element, whose rounding no mean averages out."""
_MAX_TOLERANCE = {False: 1e-2, True: 0.5}
"""Largest relative difference attributed to rounding after any number of updates, for fp32 (False)
and for smaller formats (True)."""
_MIN_SHARED = 0.5
"""Minimum fraction of the larger model's parameter names that the other model must contain."""
_FACTOR = 1e-2
"""Tolerance for deciding that two tensors differ only by a factor."""


@dataclass(frozen=True, kw_only=True)
class TraceTolerance:
    """Differences that rounding explains.

    Attributes:
        gradient_floor: Fraction of the model's mean gradient size; added to the size of a gradient
            when differences are divided by it.
        parameter_floor: Value added to the size of a parameter when differences are divided by it.
    """

    gradient_floor: float
    parameter_floor: float

    def largest(self, arithmetics: Sequence[PrecisionName], *, step: int) -> float:
        """Return the largest relative difference that passes in a step.

        Args:
            arithmetics: Lowest precisions of both runs; the coarser one counts.
            step: Number of updates before the step; the tolerance grows with it.
        """
        coarser = lowest_format(NUMBER_FORMATS[name] for name in arithmetics)
        # Rounding to bf16 and fp16 changes single gradients of small modules: by twice the base in
        # tiny models, and by more if only one run rounds, because units of ReLU flip.
        times = 2 * len(set(arithmetics)) if coarser.is_low else 1
        return min(times * coarser.tolerance * (1 + step), _MAX_TOLERANCE[coarser.is_low])


@dataclass(frozen=True)
class TracedDifference:
    """A tensor that differs between the runs.

    Attributes:
        step: Step of the runs.
        first_tensor: Tensor of the first run.
        second_tensor: Tensor of the second run.
        relative: Largest relative difference of root mean square, mean and largest element.
        ratio: Size in the first run divided by the size in the second; None if the tensors differ
            by more than a factor.
        elements: Elements that differ; None if the runs did not both write them.
    """

    step: int
    first_tensor: TracedTensor
    second_tensor: TracedTensor
    relative: float
    ratio: float | None = None
    elements: DifferentElements | None = None

    @property
    def module(self) -> str:
        """Name of the tensor's module; empty for the batch and the loss."""
        kind, name = self.first_tensor.kind, self.first_tensor.name
        if kind in ("batch", "loss"):
            return ""
        return name if kind.startswith("output") else name.rpartition(".")[0] or name


@dataclass
class TraceComparison:
    """The comparison of two runs.

    Attributes:
        steps: Tolerance of each step that both runs traced.
        compared: Number of compared tensors, over all steps.
        by_element: Number of tensors that were compared element by element.
        differences: Differences in order of computation.
        only: Names of modules and parameters that only the first or only the second run traced.
    """

    steps: dict[int, float] = field(default_factory=dict)
    compared: int = 0
    by_element: int = 0
    differences: list[TracedDifference] = field(default_factory=list)
    only: tuple[list[str], list[str]] = ([], [])


class TracesIncomparableError(Exception):
    """Two traces can't be compared; the message contains the reason."""


def compare_traces(
    first_run: Mapping[int, StepTrace],
    second_run: Mapping[int, StepTrace],
    *,
    tolerance: TraceTolerance,
    elements: Mapping[int, ElementsOfStep] | None = None,
) -> TraceComparison:
    """Compare the traces of two runs, step by step.

    Args:
        first_run: Steps of the first run.
        second_run: Steps of the second run.
        tolerance: Differences that pass.
        elements: Elements of the steps for which both runs wrote them.

    Raises:
        TracesIncomparableError: The runs have no common step, or different models.
    """
    steps = [step for step in first_run if step in second_run]
    if not steps:
        raise TracesIncomparableError(
            f"no step is in both: one has {_list_steps(first_run)}, the other "
            f"{_list_steps(second_run)}; trace the same steps with train.trace.steps"
        )
    _check_same_model(first_run[steps[0]], second_run[steps[0]])
    comparison = TraceComparison()
    for step in steps:
        one, other = first_run[step], second_run[step]
        passing = tolerance.largest((one.arithmetic, other.arithmetic), step=step)
        comparison.steps[step] = passing
        by_key = {(tensor.kind, tensor.name): tensor for tensor in other.tensors}
        floors = _floors(one, tolerance)
        ignored = _rounding_only(one, passing) | _rounding_only(other, passing)
        for tensor in one.tensors:
            counterpart = by_key.get((tensor.kind, tensor.name))
            if counterpart is None or (tensor.kind, tensor.name) in ignored:
                continue
            comparison.compared += 1
            floor = floors.get(tensor.kind, 0.0)
            relative, different = _relative(tensor, counterpart, floor=floor), None
            if elements is not None and step in elements:
                different = elements[step].compare(
                    tensor.kind, tensor.name, floor=floor, passing=passing
                )
            if different is not None:
                comparison.by_element += 1
                relative = max(relative, different.relative)
            if not relative <= passing:
                ratio = _factor(tensor, counterpart)
                comparison.differences.append(
                    TracedDifference(step, tensor, counterpart, relative, ratio, different)
                )
    first, second = (_names(side[steps[0]]) for side in (first_run, second_run))
    comparison.only = ([*(first - second)], [*(second - first)])
    comparison.only[0].sort()
    comparison.only[1].sort()
    return comparison


def describe_difference(difference: TracedDifference, names: tuple[str, str]) -> str:
    """Describe a difference and its size.

    Args:
        difference: Difference of one tensor.
        names: Names of the two runs.
    """
    first_tensor, second_tensor = difference.first_tensor, difference.second_tensor
    tensor_text = {
        "batch": f"the batch ({first_tensor.name})",
        "loss": "the loss",
        "parameter": f"the parameter {first_tensor.name}",
        "output": "its output",
        "output gradient": "the gradient of its output",
        "gradient": f"the gradient of {first_tensor.name}",
    }[first_tensor.kind]
    if first_tensor.rms is None or second_tensor.rms is None:
        runs = [
            name
            for name, tensor in zip(names, (first_tensor, second_tensor), strict=True)
            if tensor.rms is None
        ]
        return f"{tensor_text} is not finite in {' and '.join(runs)}"
    first = _first_element(difference, names)
    if difference.ratio is None:
        return f"{tensor_text} is off by {difference.relative:.2g} of its size{first}"
    digits = 2 if abs(difference.ratio - 1) > 0.1 else 3
    times = f"{difference.ratio:.{digits}f} times"
    return f"{tensor_text} is {times} as large in {names[0]} as in {names[1]}{first}"


def _first_element(difference: TracedDifference, names: tuple[str, str]) -> str:
    """Describe the first element that differs, and how many differ."""
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
    """Return the likely cause of the first difference; empty if it is unknown.

    Args:
        difference: The first difference.
        names: Names of the two runs.
        traces: Traces of its step in both runs.
        steps: Steps that both runs traced.
    """
    if difference.first_tensor.kind == "batch":
        return "because the runs read different samples (data, seed or global batch size)"
    if difference.first_tensor.kind == "parameter":
        earlier = [step for step in steps if step < difference.step]
        if not difference.step:
            return "because the runs start from different weights"
        if earlier and earlier[-1] == difference.step - 1:
            return f"because the update of step {earlier[-1]} was different"
        since = f"since step {earlier[-1]}" if earlier else "before this step"
        return f"because an update {since} was different; trace those steps too"
    return _summed_axis(difference, names, traces)


def last_same(first: TracedDifference, trace: StepTrace) -> str:
    """Return the last module whose output gradient was the same before the first difference.

    The cause is between the two modules. With residual connections, that can be several modules.

    Args:
        first: First difference of its step.
        trace: Trace of that step in one of the runs.
    """
    if first.first_tensor.kind != "output gradient":
        return ""
    names = [tensor.name for tensor in trace.tensors if tensor.kind == "output gradient"]
    index = names.index(first.first_tensor.name)
    return names[index - 1] if index else ""


def _summed_axis(
    difference: TracedDifference, names: tuple[str, str], traces: Sequence[StepTrace]
) -> str:
    """Describe a wrong sum over a mesh axis if its size equals the ratio of the tensors."""
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


def _relative(first: TracedTensor, second: TracedTensor, *, floor: float) -> float:
    """Return the relative difference of two tensors; infinite if only one is finite."""
    values = (first.rms, first.mean, first.absmax, second.rms, second.mean, second.absmax)
    if any(value is None for value in values):
        same = (first.rms is None) and (second.rms is None)
        return 0.0 if same else math.inf
    rms, mean, absmax, other_rms, other_mean, other_absmax = (value or 0.0 for value in values)
    size = max(rms, other_rms) + floor
    largest = max(absmax, other_absmax) + floor
    if not largest:
        return 0.0
    of_largest = abs(absmax - other_absmax) / largest / _OF_LARGEST
    return max(abs(rms - other_rms) / size, abs(mean - other_mean) / size, of_largest)


def _factor(first: TracedTensor, second: TracedTensor) -> float | None:
    """Return the factor between two tensors; None if they differ by more than a factor."""
    if not (first.rms and second.rms and first.absmax and second.absmax):
        return None
    ratio, of_largest = first.rms / second.rms, first.absmax / second.absmax
    # Be stricter for small factors; otherwise any small difference would count as a factor.
    within = _FACTOR * min(1.0, max(abs(ratio - 1), abs(1 / ratio - 1)))
    mean_as_expected = abs((first.mean or 0.0) - ratio * (second.mean or 0.0)) < within * first.rms
    is_one = abs(of_largest / ratio - 1) < within and mean_as_expected
    return ratio if is_one and abs(ratio - 1) > _FACTOR / 10 else None


def _floors(trace: StepTrace, tolerance: TraceTolerance) -> dict[str, float]:
    floors = {"parameter": tolerance.parameter_floor}
    for kind in ("output gradient", "gradient"):
        floors[kind] = tolerance.gradient_floor * _mean_size(trace, kind)
    return floors


def _rounding_only(trace: StepTrace, passing: float) -> set[tuple[str, str]]:
    """Return parameters with gradients of rounding errors only, and outputs of their modules.

    AdamW turns such gradients into full updates in arbitrary directions, so these tensors can't be
    compared. An example is the bias of attention keys, which softmax cancels.
    """
    if not trace.step:
        return set()
    smallest = passing * _mean_size(trace, "gradient")
    names = [
        tensor.name
        for tensor in trace.tensors
        if tensor.kind == "gradient" and tensor.rms is not None and tensor.rms < smallest
    ]
    outputs = {("output", name.rpartition(".")[0]) for name in names}
    return {("parameter", name) for name in names} | outputs


def _mean_size(trace: StepTrace, kind: str) -> float:
    """Return the root mean square of the sizes of all tensors of a kind."""
    sizes = [tensor.rms or 0.0 for tensor in trace.tensors if tensor.kind == kind]
    return math.sqrt(sum(size * size for size in sizes) / max(1, len(sizes)))


def _names(trace: StepTrace) -> set[str]:
    return {tensor.name for tensor in trace.tensors if tensor.name and tensor.kind != "batch"}


def _check_same_model(first_trace: StepTrace, second_trace: StepTrace) -> None:
    """Check that parameters have the same names and sizes.

    Raises:
        TracesIncomparableError: Most names differ, or a size does.
    """
    first, second = (
        {tensor.name: tensor.size for tensor in trace.tensors if tensor.kind == "parameter"}
        for trace in (first_trace, second_trace)
    )
    shared = [name for name in first if name in second]
    if len(shared) < _MIN_SHARED * max(len(first), len(second)) or not shared:
        similar = "; ".join(_similar_names(first, second))
        raise TracesIncomparableError(
            f"these are different models: one has {len(first)} parameters, the other "
            f"{len(second)}; {len(shared)} names are in both"
            f"{f' (similar: {similar})' if similar else ''}"
        )
    for name in shared:
        if first[name] != second[name]:
            raise TracesIncomparableError(
                f"these are different models: {name} has {first[name]:,} elements in one and "
                f"{second[name]:,} in the other"
            )


def _similar_names(
    first: Mapping[str, int | None], second: Mapping[str, int | None]
) -> Iterator[str]:
    """Yield up to three pairs of similar names that are in only one of the models."""
    candidates = [name for name in second if name not in first]
    count = 0
    for name in first:
        if count < 3 and name not in second and (similar := nearest(name, candidates)):
            count += 1
            yield f"{name} and {similar}"


def _list_steps(steps: Mapping[int, StepTrace]) -> str:
    return ", ".join(map(str, steps)) or "none"
