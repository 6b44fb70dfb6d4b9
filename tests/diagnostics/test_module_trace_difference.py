"""Comparison of two module traces: the first difference, and values that can't be compared."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from axonlaunch.diagnostics.module_trace import files
from axonlaunch.diagnostics.module_trace.difference import (
    TraceComparison,
    TracesIncomparableError,
    TraceTolerance,
    compare_traces,
    describe_difference,
    last_same,
    likely_cause,
)
from axonlaunch.diagnostics.module_trace.files import StepTrace, TracedTensor

TOLERANCE = TraceTolerance(gradient_floor=0.1, parameter_floor=0.02)
BEGIN = StepTrace(
    step=0,
    arithmetic="fp32",
    layout="tensor 2",
    axes={"tp": 2},
    tensors=(
        TracedTensor("batch", "inputs", 3.0, 1.0, 9.0),
        TracedTensor("parameter", "first.weight", 0.1, 0.0, 0.3, 64),
        TracedTensor("parameter", "second.weight", 0.1, 0.0, 0.3, 64),
        TracedTensor("output", "first", 1.0, 0.1, 3.0),
        TracedTensor("output", "second", 1.0, 0.1, 3.0),
        TracedTensor("loss", "", 2.0, 2.0, 2.0),
        TracedTensor("output gradient", "second", 1e-3, 0.0, 4e-3),
        TracedTensor("gradient", "second.weight", 1e-2, 0.0, 4e-2, 64),
        TracedTensor("gradient", "first.weight", 1e-2, 0.0, 4e-2, 64),
    ),
)


def scaled(factor: float, *names: str, kind: str = "output") -> StepTrace:
    """Return the trace with some tensors scaled by a factor."""

    def of(tensor: TracedTensor) -> TracedTensor:
        if tensor.kind != kind or tensor.name not in names:
            return tensor
        assert tensor.rms is not None
        assert tensor.mean is not None
        assert tensor.absmax is not None
        larger = (tensor.rms * factor, tensor.mean * factor, tensor.absmax * factor)
        return TracedTensor(tensor.kind, tensor.name, *larger, tensor.size)

    return dataclasses.replace(BEGIN, tensors=tuple(map(of, BEGIN.tensors)))


def compared(ours: StepTrace, changed: StepTrace) -> TraceComparison:
    return compare_traces({ours.step: ours}, {changed.step: changed}, tolerance=TOLERANCE)


def said(ours: StepTrace, changed: StepTrace) -> tuple[str, str]:
    """Return the description of the first difference, and its likely cause."""
    first, names = compared(ours, changed).differences[0], ("a", "b")
    what = f"{first.module}: {describe_difference(first, names)}"
    return what, likely_cause(first, names, (ours, changed), steps=[ours.step])


def test_the_first_in_order_of_computation_is_named_and_not_the_farthest() -> None:
    other = scaled(1.5, "first")
    worse = dataclasses.replace(
        other, tensors=[*other.tensors[:4], *scaled(9.0, "second").tensors[4:]]
    )
    comparison = compared(BEGIN, worse)
    assert [difference.first_tensor.name for difference in comparison.differences] == [
        "first",
        "second",
    ]
    assert comparison.differences[0].module == "first"


def test_a_factor_as_large_as_an_axis_is_said_of_the_run_that_has_the_axis() -> None:
    assert said(scaled(2.0, "second"), dataclasses.replace(BEGIN, axes={})) == (
        "second: its output is 2.00 times as large in a as in b",
        "as if a summed once too often over tp",
    )
    halved = scaled(0.5, "first.weight", kind="gradient")
    assert said(dataclasses.replace(BEGIN, axes={}), halved) == (
        "first: the gradient of first.weight is 2.00 times as large in a as in b",
        "as if b did not sum, or averaged twice, over tp",
    )


def test_small_trace_difference_is_reported_relative_to_size() -> None:
    other = dataclasses.replace(
        BEGIN, tensors=(*BEGIN.tensors[:3], TracedTensor("output", "first", 1.2, -0.1, 3.0))
    )
    assert said(BEGIN, other) == ("first: its output is off by 0.17 of its size", "")


def test_nonfinite_trace_values_differ_unless_in_both_runs() -> None:
    nan = dataclasses.replace(
        BEGIN, tensors=(*BEGIN.tensors[:3], TracedTensor("output", "first", None, None, None))
    )
    assert said(BEGIN, nan) == ("first: its output is not finite in b", "")
    assert not compared(nan, nan).differences


def test_a_gradient_of_nothing_but_rounding_is_no_difference() -> None:
    tiny = TracedTensor("gradient", "first.weight", 1e-10, 0.0, 1e-10, 64)
    ours, changed = (
        dataclasses.replace(BEGIN, tensors=(*BEGIN.tensors[:-1], last))
        for last in (tiny, dataclasses.replace(tiny, rms=3e-10))
    )
    assert not compared(ours, changed).differences


@pytest.mark.parametrize(("arithmetic", "passes"), [("fp32", False), ("bf16", True)])
def test_trace_tolerance_follows_coarser_precision(arithmetic: str, passes: bool) -> None:
    other = dataclasses.replace(scaled(1.01, "first"), arithmetic=arithmetic)  # type: ignore[arg-type]
    assert bool(compared(BEGIN, other).differences) is not passes


def test_rounding_grows_with_the_updates_up_to_a_hundredth() -> None:
    passing = [TOLERANCE.largest(("fp32", "fp32"), step=step) for step in (0, 99, 10_000)]
    assert passing == pytest.approx([1e-5, 1e-3, 1e-2])


def test_rounding_sensitive_values_are_compared_only_before_first_update() -> None:
    tiny = TracedTensor("gradient", "first.bias", 1e-10, 0.0, 1e-10, 8)
    gradients = (*BEGIN.tensors[-2:], tiny)
    ours, changed = (
        dataclasses.replace(
            BEGIN,
            tensors=(
                TracedTensor("parameter", "first.weight", 0.1, 0.0, 0.3, 64),
                TracedTensor("parameter", "first.bias", moved, moved, moved, 8),
                TracedTensor("output", "first", 1 + moved, 0.0, 3.0),
                *gradients,
            ),
        )
        for moved in (0.1, 0.2)
    )
    assert len(compared(ours, changed).differences) == 2
    later = (dataclasses.replace(trace, step=1) for trace in (ours, changed))
    assert not compared(*later).differences


def test_only_common_trace_steps_are_compared() -> None:
    later = dataclasses.replace(BEGIN, step=7)
    assert [*compare_traces({0: BEGIN, 7: later}, {7: later}, tolerance=TOLERANCE).steps] == [7]
    with pytest.raises(TracesIncomparableError, match="one has 0, the other 7; trace the same"):
        compare_traces({0: BEGIN}, {7: later}, tolerance=TOLERANCE)


def test_other_models_are_refused_with_how_many_names_are_alike_and_which_are_near() -> None:
    renamed = dataclasses.replace(
        BEGIN, tensors=(TracedTensor("parameter", "model.first.weight", 0.1, 0.0, 0.3, 64),)
    )
    problem = r"one has 2 parameters, the other 1; 0 names are in both \(similar: first.weight and"
    with pytest.raises(TracesIncomparableError, match=problem):
        compared(BEGIN, renamed)
    wider = dataclasses.replace(
        BEGIN,
        tensors=(BEGIN.tensors[1], dataclasses.replace(BEGIN.tensors[2], size=128)),
    )
    with pytest.raises(TracesIncomparableError, match="has 64 elements in one and 128"):
        compared(BEGIN, wider)


def test_trace_names_in_only_one_run_are_listed() -> None:
    fewer = dataclasses.replace(BEGIN, tensors=[t for t in BEGIN.tensors if t.name != "first"])
    assert compared(BEGIN, fewer).only == (["first"], [])


def test_trace_step_reads_nonfinite_values_as_missing(tmp_path: Path) -> None:
    odd = TracedTensor("output", "first", math.nan, math.inf, 1.0)
    files.write_step(tmp_path, dataclasses.replace(BEGIN, tensors=(*BEGIN.tensors, odd)))
    [(step, path)] = files.traced_steps(tmp_path).items()
    read = files.read_step(path)
    missing = TracedTensor("output", "first", None, None, 1.0)
    assert (step, read) == (0, dataclasses.replace(BEGIN, tensors=(*BEGIN.tensors, missing)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{}",
        '{"format": 2}',
        "NaN",
        '{"format": 1, "tensors": [["output", "\\u001b", 1]]}',
    ],
)
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "step_0.json").write_text(text)
    with pytest.raises(files.UnreadableModuleTraceError, match="json: is not a module trace"):
        files.read_step(tmp_path / "step_0.json")


def test_small_trace_difference_has_no_factor() -> None:
    other = dataclasses.replace(
        BEGIN, tensors=(*BEGIN.tensors[:3], TracedTensor("output", "first", 1.004, 0.1, 3.001))
    )
    assert said(BEGIN, other)[0] == "first: its output is off by 0.004 of its size"


def test_other_samples_and_other_weights_are_said_to_be_that() -> None:
    for kind, name, why in (
        (
            "batch",
            "inputs",
            "because the runs read different samples (data, seed or global batch size)",
        ),
        ("parameter", "first.weight", "because the runs start from different weights"),
    ):
        assert said(BEGIN, scaled(2.0, name, kind=kind))[1] == why


def test_parameters_that_part_later_are_laid_to_an_update_before() -> None:
    later, other = (
        dataclasses.replace(trace, step=4)
        for trace in (BEGIN, scaled(2.0, "first.weight", kind="parameter"))
    )
    first = compared(later, other).differences[0]
    for steps, why in (
        ([0, 4], "because an update since step 0 was different; trace those steps too"),
        ([3, 4], "because the update of step 3 was different"),
        ([4], "because an update before this step was different; trace those steps too"),
    ):
        assert likely_cause(first, ("a", "b"), (later, other), steps=steps) == why


def test_a_gradient_that_is_wrong_is_laid_between_two_modules() -> None:
    added = TracedTensor("output gradient", "first", 1e-3, 0.0, 4e-3)
    begin = dataclasses.replace(BEGIN, tensors=(*BEGIN.tensors, added))
    worse = dataclasses.replace(added, rms=3e-3, absmax=12e-3)
    first = compared(
        begin, dataclasses.replace(begin, tensors=(*BEGIN.tensors, worse))
    ).differences[0]
    assert last_same(first, begin) == "second"
