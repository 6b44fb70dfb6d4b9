"""Lists the features that a comparison exercised and those that it did not.

The list is derived from the configuration that was compared and from the reference's steps.
"""

from __future__ import annotations

import math

from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.config.values.optional_keys import weight_decay
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.reference_values import Reference

NOT = "not exercised"


def exercised_features(
    config: RunConfig, plan: ComparisonPlan, reference: Reference, *, masks: int
) -> dict[str, str]:
    """Map each feature to how it was exercised, or to ``not exercised`` and the key to change.

    Args:
        config: Configuration that was compared.
        plan: Length and scope of the comparison.
        reference: Values computed by one process.
        masks: Number of random draws that were compared: dropout masks, or probes in a model
            without dropout.
    """
    masters = precision_of(config).masters
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
        + (f" with masters in {masters.name}" if masters is not None else "")
        + (f", rounded products ({train.matmul_dtype})" if train.matmul_dtype else "")
        + (", reference in fp64" if plan.fp64 else ""),
        "accumulation": _accumulation(layout),
        "uneven targets": "by row and step",
        "clipping": f"{NOT}; use train.grad_clip=1.0"
        if train.grad_clip is None
        else f"in {clipped} of {len(reference.steps)} steps",
        "weight decay": _number(weight_decay(config.optimizer)),
        "learning rate": _rates(reference),
        "recomputation": _chosen(train.activation_checkpointing, "train.activation_checkpointing"),
        "compile": "each block" if train.compile else f"{NOT}; use train.compile=true",
        "offload": _chosen(config.strategy.fsdp.cpu_offload, "strategy.fsdp.cpu_offload")
        if layout.facts.shards_parameters
        else f"{NOT}; only fsdp can offload",
        "dropout": f"the model has none; {masks} random draws were compared"
        if not reference.dropout
        else f"up to {reference.dropout:g}: {masks} masks were compared; off otherwise",
        "evaluation": _evaluations(reference),
        "training loop": f"the last {plan.steps - plan.saved} steps"
        if plan.trains_on
        else f"{NOT}; axonlaunch verify runs the last steps in it",
        "resume": f"after {plan.saved} steps, same layout; weights also read with other shards"
        if plan.beyond
        else f"{NOT}; axonlaunch verify does",
        "background save": "states were overwritten during the save"
        if plan.beyond and config.checkpoint.async_save
        else f"{NOT}; use launch.backend=gloo checkpoint.async_save=true",
    }
    if PRECISIONS[train.precision].needs_loss_scale:
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
