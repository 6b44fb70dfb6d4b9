"""What a comparison exercised and what it did not, so that nobody thinks more proved than is.

It reads the configuration that was compared, and compares nothing.
"""

from __future__ import annotations

import math

from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout, num_ranks
from axonlaunch.verification.comparison_plan import ComparisonPlan
from axonlaunch.verification.reference_values import Reference

NOT = "not exercised"


def features(
    config: RunConfig, plan: ComparisonPlan, reference: Reference, *, masks: int
) -> dict[str, str]:
    """Return, by feature, how it was exercised, or ``not exercised`` and what would.

    Args:
        config: The layout's, as it was compared.
        plan: What was compared.
        reference: What one process computed.
        masks: Random draws that were compared: of a model with dropout its masks.
    """
    train, layout = config.train, Layout.of(config, world_size=num_ranks(config))
    clipped = sum(
        train.grad_clip is not None and train.grad_clip < step.norm < math.inf
        for step in reference.steps
    )
    skipped = sum(step.skipped for step in reference.steps)
    exercised = {
        "real processes": (
            f"{NOT}; use launch.backend=gloo"
            if config.launch.backend == "mock"
            else f"backend {config.launch.backend}"
        ),
        "precision": f"{train.precision}, weights in {train.param_dtype}"
        + (", reference in fp64" if plan.fp64 else ""),
        "accumulation": _accumulation(layout),
        "uneven targets": "by row and step",
        "clipping": f"{NOT}; use train.grad_clip=1.0"
        if train.grad_clip is None
        else f"in {clipped} of {len(reference.steps)} steps",
        "weight decay": _number(getattr(config.optimizer, "weight_decay", None)),
        "learning rate": _rates(reference),
        "recomputation": _chosen(train.activation_checkpointing, "train.activation_checkpointing"),
        "compile": "each block" if train.compile else f"{NOT}; use train.compile=true",
        "offload": _chosen(config.strategy.fsdp.cpu_offload, "strategy.fsdp.cpu_offload")
        if layout.facts.shards_parameters
        else f"{NOT}; it is for fsdp",
        "dropout": f"the model has none; {masks} random draws were compared"
        if not reference.dropout
        else f"up to {reference.dropout:g}: {masks} masks were compared; off for all else",
        "evaluation": _evaluations(reference),
        "training loop": f"the last {plan.steps - plan.saved} steps"
        if plan.trains_on
        else f"{NOT}; axonlaunch verify has it do the last steps",
        "resume": f"after {plan.saved} steps, in the same layout; weights also read in other parts"
        if plan.beyond
        else f"{NOT}; axonlaunch verify does",
        "background save": "from states that are overwritten"
        if plan.beyond and config.checkpoint.async_save
        else f"{NOT}; use launch.backend=gloo checkpoint.async_save=true",
    }
    if train.precision == "fp16":
        exercised["skipped steps"] = f"{skipped} of {len(reference.steps)}"
    return exercised


def _accumulation(layout: Layout) -> str:
    if layout.pipeline > 1:
        return f"{layout.rounds} rounds of {layout.microbatches_per_round} micro-batches"
    if layout.micro_batches == 1:
        return f"{NOT}; use a smaller train.micro_batch_size"
    return f"{layout.micro_batches} micro-batches of {layout.micro_batch_size}"


def _evaluations(reference: Reference) -> str:
    if reference.evaluation is None:
        return NOT
    return "halfway" if reference.end_evaluation is None else "halfway, and at the end of training"


def _number(decay: float | None) -> str:
    return f"{decay:g}" if decay else f"{NOT}; use optimizer.weight_decay=0.1"


def _chosen(value: str, key: str) -> str:
    return f"{NOT}; use {key}=full" if value == "none" else value


def _rates(reference: Reference) -> str:
    rates = [step.rate for step in reference.steps]
    if len(set(rates)) == 1:
        return f"the same in every step: {rates[0]:.3g}"
    return f"from {min(rates):.3g} to {max(rates):.3g}"
