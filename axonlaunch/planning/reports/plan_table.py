"""Formats a plan for a terminal: a table of its layouts, and the parts of their step time."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from axonlaunch.planning.records import Plan, Planned
from axonlaunch.system.text.formatting import size

_MIN_SHARE = 0.01
"""Share of a step below which a difference is not reported."""
_MIN_REASON = 0.25
"""Share of the difference of two steps above which a part of it is reported in any case."""
_CHANGES = "*"
"""Mark of layouts that change numerics."""


def build_plan_table(plan: Plan) -> Table:
    """Return a row for each layout."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("")
    table.add_column("layout", overflow="fold")
    # MFU is known for sequences of tokens only.
    counted = "tokens" if any(planned.mfu is not None for planned in plan.candidates) else "samples"
    for name in ("per device", f"{counted}/s/device", "step", "MFU"):
        table.add_column(name, justify="right")
    for number, planned in enumerate(plan.candidates, 1):
        memory = size(planned.process_bytes)
        table.add_row(
            f"{number}{_CHANGES if planned.numerics else ''}",
            planned.layout,
            Text(memory) if planned.fits else Text(f"{memory} {_unfit(planned)}", style="red"),
            f"{planned.tokens_per_s_per_device:,.0f}",
            _step(planned.step_s),
            "" if planned.mfu is None else f"{planned.mfu:.1%}",
        )
    return table


def notes(plan: Plan) -> Iterator[str]:
    """Yield what the plan assumes, and what it left out."""
    if plan.nodes.count > 1:
        nodes = f"{plan.nodes.count:,} nodes with {plan.nodes.ranks} ranks each"
        yield f"assumes {nodes}; for others set launch.nnodes"
    devices, batch = plan.nodes.count * plan.nodes.ranks, plan.workload.global_batch_size
    if batch > devices and (rest := batch % devices):
        larger = f"train.global_batch_size={batch - rest + devices}"
        yield f"{devices:,} data-parallel ranks can't share {batch:,} samples; {larger} allows it"
    if plan.assumed:
        figures = ", ".join(f"{key}={value:g}" for key, value in plan.assumed.items())
        yield f"not published for this hardware, so assumed: {figures}"
    if plan.typical:
        keys = " and ".join(plan.typical)
        yield f"memory includes typical figures, which can be off by 2x, for {keys}"
    if plan.imbalance is not None:
        yield (
            f"where ranks split experts, one is assumed to get {plan.imbalance:g} times the mean "
            "number of tokens; for another router set estimate.imbalance"
        )
    for problem in plan.not_tried:
        yield f"not searched: {problem}"
    if any(planned.numerics for planned in plan.candidates):
        yield f"layouts with {_CHANGES} change the numerics of the run: losses will differ"
    if plan.untraced:
        layouts = "1 more layout" if plan.untraced == 1 else f"{plan.untraced:,} more layouts"
        yield f"by formulas, {layouts} may be faster than the first one, but were not traced"


def compile_note(plan: Plan) -> str | None:
    """Return what the first layout gains from compiled blocks; None if that is not worth it."""
    if (compiled := plan.compiled) is None:
        return None
    saved = 1 - compiled.step_s / plan.candidates[0].step_s
    return (
        f"with {' '.join(compiled.overrides)}, layout 1 is expected to take "
        f"{_step(compiled.step_s)} ({saved:.0%} less); its kernels are not traced but priced as in "
        "published runs, the first step compiles them, and axonlaunch estimate predicts the memory"
    )


def _step(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _unfit(planned: Planned) -> str:
    if planned.verdict == "tight":
        return "tight"
    return "too large" if planned.verdict == "too_large" else "too little host memory"


def time_shares(planned: Planned) -> str:
    """Describe the parts of a step's time, largest first."""
    shares = sorted(planned.breakdown.items(), key=lambda item: -item[1])
    times = [
        f"{name} {seconds / planned.step_s:.0%}"
        for name, seconds in shares
        if seconds > _MIN_SHARE * planned.step_s
    ]
    return ", ".join(times)


def why_slower(first: Planned, second: Planned) -> str:
    """Explain why the second layout is slower than the first, largest difference first."""
    if not second.fits:
        spare = ", with less to spare than estimate.margin" if second.verdict == "tight" else ""
        return f"does not fit: {_unfit(second)}{spare}"
    names = first.breakdown.keys() | second.breakdown.keys()
    differences = {
        name: second.breakdown.get(name, 0.0) - first.breakdown.get(name, 0.0) for name in names
    }
    least = _MIN_SHARE * first.step_s
    if second.step_s > first.step_s:
        least = min(least, _MIN_REASON * (second.step_s - first.step_s))
    largest = [
        f"{name} {seconds:+.2g} s"
        for name, seconds in sorted(differences.items(), key=lambda item: -item[1])
        if seconds > least
    ]
    slower = second.step_s / first.step_s - 1
    if slower < 0 and second.rank_factor > first.rank_factor:
        return f"{-slower:.1%} faster, too little for what it offloads"
    return f"{slower:.1%} slower: " + (", ".join(largest[:3]) or "small differences in all parts")
