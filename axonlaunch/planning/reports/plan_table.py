"""A plan for a terminal: the table of its layouts, and in words where their time goes."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from axonlaunch.planning.records import Plan, Planned
from axonlaunch.system.formatting import size

_TELLING = 0.01
"""Share of a step below which a difference is not reported."""


def build_plan_table(plan: Plan) -> Table:
    """Return a row for each layout."""
    made = Table(box=None, pad_edge=False, header_style="")
    made.add_column("")
    made.add_column("layout", overflow="fold")
    for name in ("per device", "tokens/s/device", "step", "MFU"):
        made.add_column(name, justify="right")
    for number, planned in enumerate(plan.candidates, 1):
        memory = size(planned.process_bytes)
        made.add_row(
            str(number),
            planned.layout,
            Text(memory) if planned.fits else Text(f"{memory} {_unfit(planned)}", style="red"),
            f"{planned.tokens_per_s_per_device:,.0f}",
            f"{planned.step_s:.3g} s",
            "" if planned.mfu is None else f"{planned.mfu:.1%}",
        )
    return made


def _unfit(planned: Planned) -> str:
    if planned.verdict == "tight":
        return "tight"
    return "too large" if planned.verdict == "too_large" else "too little host memory"


def spent(planned: Planned) -> str:
    """Say where a step's time goes, most first."""
    shares = sorted(planned.breakdown.items(), key=lambda item: -item[1])
    times = [
        f"{name} {seconds / planned.step_s:.0%}"
        for name, seconds in shares
        if seconds > _TELLING * planned.step_s
    ]
    return ", ".join(times)


def why_slower(first: Planned, second: Planned) -> str:
    """Say what the second loses to the first, most first."""
    if not second.fits:
        return f"does not fit: {_unfit(second)}"
    names = first.breakdown.keys() | second.breakdown.keys()
    lost = {
        name: second.breakdown.get(name, 0.0) - first.breakdown.get(name, 0.0) for name in names
    }
    worst = [
        f"{name} {seconds:+.2g} s"
        for name, seconds in sorted(lost.items(), key=lambda item: -item[1])
        if seconds > _TELLING * first.step_s
    ]
    slower = second.step_s / first.step_s - 1
    return f"{slower:.1%} slower: " + (", ".join(worst[:3]) or "a little of everything")
