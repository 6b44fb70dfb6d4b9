"""Decides the verdict from the differences of all ranks: passed, failed, or nothing proved.

The verdict is "nothing proved" if the comparison could not have failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.verification.comparison.exercised_features import exercised_features
from axonlaunch.verification.comparison.layout_run import STEPS_OF_MASKS, RankReport
from axonlaunch.verification.comparison.schedule_check import schedule_problems
from axonlaunch.verification.decisions.random_draws import Draw, draw_problems
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.differences import ORDER, Difference
from axonlaunch.verification.references.reference_values import Reference
from axonlaunch.verification.references.tolerances import Tolerances
from axonlaunch.verification.result import ParityResult, layout_of

_SAME = 1e-6
"""Relative change below which losses of different steps are considered equal."""
_NEVER_ROUNDED = {"arithmetic", "order", "counted", "again", "sum"}
"""Kinds that are compared in every step, even if rounding is too large for other kinds."""
_MAX_LISTED = 8
"""Largest number of ranks that a difference lists."""

_COMPILED_EXPERTS = (
    "compiled routers can't be given the choices of one process: if rounding sends tokens to "
    "other experts, their gradients differ; compare with train.compile=false, too"
)


def decide_verdict(
    config: RunConfig,
    plan: ComparisonPlan,
    references: Sequence[Reference],
    reports: Iterable[RankReport],
) -> ParityResult:
    """Decide whether rounding explains all differences and whether the comparison shows anything.

    Args:
        config: Configuration of the layout.
        plan: Length and scope of the comparison.
        references: Values of one process, followed by references with perturbed weights.
        reports: Results of all ranks.
    """
    reference, *others = references
    tolerances = Tolerances(config, reference, others)
    reports = [*reports]
    differences = [difference for report in reports for difference in report.differences]
    draws = [draw for report in reports for draw in report.draws]
    differences = [
        d
        for d in [*differences, *_missing(reference, differences)]
        if d.step <= tolerances.last_step or d.kind in _NEVER_ROUNDED
    ]
    wrong = [] if plan.original is None else [*schedule_problems(plan.original)]
    allowed: list[Difference] = []
    too_large: list[Difference] = []
    for difference in differences:
        (allowed if tolerances.allows(difference) else too_large).append(difference)
    wrong += _group_by_quantity(too_large)
    wrong += _wrong_draws(config, plan, reference, draws)
    masks = sum(bool(draw.value) for draw in draws)
    largest = {kind: _largest(d for d in differences if d.kind == kind) for kind in ORDER}
    named = [d for kind in ("gradient", "parameter") if (d := largest[kind]) is not None]
    proved = _prove(reference, differences)
    reason = "" if wrong else _nothing_proved(config, reference, proved, tolerances)
    return ParityResult(
        passed=not wrong and not reason,
        verdict="failed" if wrong else "nothing proved" if reason else "passed",
        reason=reason,
        layout=layout_of(config),
        steps=len(reference.steps),
        tolerance=tolerances.base,
        max_loss_difference=_size(largest["loss"]),
        max_gradient_difference=_size(largest["gradient"]),
        max_norm_difference=_size(largest["norm"]),
        max_parameter_difference=_size(largest["parameter"]),
        max_differences={kind: d.relative for kind, d in largest.items() if d is not None},
        tolerances={
            kind: tolerances.for_difference(d) for kind, d in largest.items() if d is not None
        },
        worst_parameter=max(named, key=_size).name if named else None,
        losses=[step.loss for step in reference.steps],
        differences=wrong,
        features=exercised_features(config, plan, reference, masks=masks),
        notes=[*_notes(config, reference, allowed, masks=masks, has_failed=bool(wrong))],
        parameters=len(reference.start),
        parameters_with_gradient=len(proved.with_gradient),
        parameters_moved=len(proved.moved),
        frozen_parameters=[*reference.frozen],
        unproved_parameters=[
            name
            for name in reference.start
            if name not in reference.frozen
            and (name not in proved.with_gradient or name not in proved.moved)
        ],
    )


def _wrong_draws(
    config: RunConfig, plan: ComparisonPlan, reference: Reference, draws: Sequence[Draw]
) -> Iterable[str]:
    """Yield the problems of the random numbers of all ranks."""
    recorded = STEPS_OF_MASKS if reference.dropout else plan.steps
    yield from draw_problems(config, draws, steps=recorded, has_dropout=reference.dropout > 0)
    if reference.masks and not draws and not config.train.compile:
        yield (
            "no rank uses dropout in training, unlike one process: the model is not in training "
            "mode"
        )


def _notes(
    config: RunConfig,
    reference: Reference,
    allowed: Iterable[Difference],
    *,
    masks: int,
    has_failed: bool,
) -> Iterable[str]:
    """Yield what a reader of the verdict must know about dropout and experts.

    Args:
        config: Configuration of the layout.
        reference: Values of one process.
        allowed: Differences within their tolerances.
        masks: Number of dropout masks that were compared.
        has_failed: Whether other differences are too large.
    """
    if reference.dropout:
        yield _dropout_note(reference.dropout, masks)
    layout = Layout.of(config, world_size=num_ranks(config))
    choices = [d for d in allowed if d.kind == "choice"]
    yield from _tie_notes([d for d in choices if layout.reports_outputs(d.rank)])
    is_compiled_mixture = config.train.compile and reference.num_experts > 0
    if has_failed and is_compiled_mixture and precision_of(config).compute.is_low:
        yield _COMPILED_EXPERTS


def _dropout_note(rate: float, masks: int) -> str:
    on = f"{masks} masks were compared with it on" if masks else "no mask was drawn with it on"
    return f"dropout (up to {rate:g}) was off where numbers were compared; {on}"


def _tie_notes(ties: Sequence[Difference]) -> Iterable[str]:
    """Yield a note about tokens that rounding sends to other experts, if there are any."""
    if ties:
        first = ties[0]
        yield (
            f"rounding sends {sum(tie.count for tie in ties)} tokens to other experts than in one "
            f"process (first in {first.name}, step {first.step}); everything else was compared "
            "with equal choices"
        )


class _Proved:
    """Parameters that the comparison covers.

    Attributes:
        with_gradient: Names of parameters with a nonzero gradient in one process and a gradient in
            the layout.
        moved: Names of parameters that the updates of one process changed.
    """

    def __init__(self, with_gradient: set[str], moved: set[str]) -> None:
        self.with_gradient = with_gradient
        self.moved = moved


def _prove(reference: Reference, differences: Sequence[Difference]) -> _Proved:
    compared = {d.name for d in differences if d.kind == "gradient" and d.relative < float("inf")}
    nonzero = {
        name
        for step in reference.steps
        for name, gradient in step.gradients.items()
        if bool(gradient.any())
    }
    moved = {
        name
        for name, start in reference.start.items()
        if not torch.equal(start, reference.end[name])
    }
    return _Proved(nonzero & compared, moved)


def _nothing_proved(
    config: RunConfig, reference: Reference, proved: _Proved, tolerances: Tolerances
) -> str:
    """Return the reason why the comparison could not have failed; empty if it could."""
    losses = [step.loss for step in reference.steps]
    if num_ranks(config) == 1:
        return "one rank was compared with one process; use launch.nproc=2 or a strategy of several"
    if tolerances.last_step < 1:
        return (
            "rounding errors change the first step too much for a comparison; "
            "use another precision or realistic initial weights"
        )
    if all(step.skipped for step in reference.steps):
        return "fp16 skipped every step because its gradients overflowed; use more --steps"
    if not any(bool(g.any()) for step in reference.steps for g in step.gradients.values()):
        return "every gradient of one process is zero: the model's loss depends on no parameter"
    if not proved.with_gradient:
        return "no parameter has a gradient on both sides"
    if not proved.moved:
        rate = "" if any(step.rate for step in reference.steps) else ": the learning rate is 0"
        return f"no parameter moved{rate}, so no update was compared"
    if len(losses) > 1 and max(losses) - min(losses) <= _SAME * abs(losses[0]):
        return f"the loss is {losses[0]:.7g} in every step, for all samples and weights"
    return ""


def _group_by_quantity(wrong: Sequence[Difference]) -> list[str]:
    """Return one line for each quantity that differs, with its ranks, the earliest first."""
    order = sorted(wrong, key=lambda d: (d.step, ORDER.index(d.kind)))
    groups: dict[tuple[int, str, str], list[Difference]] = {}
    for difference in order:
        groups.setdefault((difference.step, difference.kind, difference.name), []).append(
            difference
        )
    return [_line(group) for group in groups.values()]


def _line(group: Sequence[Difference]) -> str:
    largest = max(group, key=_size)
    ranks = sorted({difference.rank for difference in group})
    lists_ranks = largest.actual is None and len(ranks) <= _MAX_LISTED
    return f"{largest} (rank {_list_ranks(ranks)})" if lists_ranks else f"{largest}"


def _list_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _largest(differences: Iterable[Difference]) -> Difference | None:
    return max(differences, key=_size, default=None)


def _size(difference: Difference | None) -> float:
    return 0.0 if difference is None else difference.relative


def _missing(reference: Reference, differences: Sequence[Difference]) -> Iterable[Difference]:
    """Yield differences for gradients, buffers and optimizer states that no rank has."""
    compared = {(d.step, d.kind, d.name) for d in differences}
    for number, step in enumerate(reference.steps, start=1):
        if not step.skipped:
            for name in step.gradients:
                if (number, "gradient", name) not in compared:
                    yield Difference(number, "gradient", name, float("inf"))
    for kind, names in (("buffer", reference.buffers), ("state", reference.states)):
        for name in names:
            if (reference.saved_step, kind, name) not in compared:
                yield Difference(reference.saved_step, kind, name, float("inf"))
