"""Computes the memory of parameters, gradients and optimizer states during a step by formulas.

The formulas follow Rajbhandari et al., "ZeRO", 2020, section 3, with the additional memory of cast,
gathered and reduced tensors.
"""

from __future__ import annotations

from typing import TypeAlias

from axonlaunch.comm.averaging.gradient_bucket import BUCKET_BYTES
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.consistency.run_precision import precision_of, sums_as_stored
from axonlaunch.config.precision import master_format
from axonlaunch.engines.data_parallel.fsdp import CPUOffload
from axonlaunch.engines.data_parallel.gradient_synchronizer import TRAVELING
from axonlaunch.models.facts.parameter_facts import TrainingShares
from axonlaunch.planning.tracing.storage_trace import Category

_WORKING_LAYERS = 2
"""Number of layers that FSDP has gathered at the same time."""

Moments: TypeAlias = dict[str, dict[Category, float]]
"""Bytes by category, for named moments of a step."""


def moments(
    config: RunConfig,
    layout: Layout,
    *,
    total: float,
    layer: float,
    ends: float,
    shares: TrainingShares,
    leading: tuple[float, float] = (0.0, 0.0),
    expert_share: float = 0.0,
) -> Moments:
    """Return the memory of a rank without activations at the possible peaks of a step.

    The moments are ``loss``, ``last block`` and ``first block`` of the last backward, in this
    order, and ``update``. In a pipeline, ``loss`` is before the first backward of its last round,
    ``last block`` beside the gradients of all its stages.

    Args:
        config: Configuration of the run.
        layout: Parallel layout of the run.
        total: Parameters of the rank's stages before division by other axes, in bytes.
        layer: Parameters of one repeated layer, in bytes.
        ends: Parameters outside the layers, in bytes.
        shares: Sizes of gradients and optimizer states relative to the parameters.
        leading: Parameters of the rank's layers before the repeated ones, and of one such layer, in
            bytes.
        expert_share: Share of experts in the parameters of a repeated layer.
    """
    total, layer, ends = (size / layout.tensor for size in (total, layer, ends))
    leading = (leading[0] / layout.tensor, leading[1] / layout.tensor)
    looked_up = min(ends, shares.looked_up * total)
    around = looked_up, ends - looked_up
    of_step = _moments(config, layout, total, layer, around, leading, shares, expert_share)
    if config.train.optimizer_in_backward:
        shards = layout.parameter_shards if layout.facts.shards_parameters else 1
        largest_unit = shares.gradients * max(layer, leading[1], *around) / shards
        for name, moment in of_step.items():
            kept = largest_unit if name in ("last block", "first block") else 0.0
            moment["gradients"] = min(kept, moment["gradients"])
    return of_step


def _moments(
    config: RunConfig,
    layout: Layout,
    total: float,
    layer: float,
    around: tuple[float, float],
    leading: tuple[float, float],
    shares: TrainingShares,
    expert_share: float,
) -> Moments:
    """Return the moments of a step whose update follows its backward.

    ``around`` has the parameters outside the layers: embeddings, and parameters of products.
    """
    ends = sum(around) + leading[0]
    if layout.facts.shards_parameters:
        kept = 1.0
        if layout.expert > 1:  # a rank gathers its experts, which tensor ranks do not divide
            kept += expert_share * (layout.tensor / layout.expert - 1)
        gathered = (max(kept * layer, leading[1]), ends + kept * (total - ends))
        return _sharded_moments(config, layout, total, gathered, around, shares)
    if layout.facts.divides_update and layout.gradient_ranks > 1:
        return _divided_update_moments(config, layout, total, around, shares)
    return _replicated_moments(config, layout, total, around, shares)


def states(moments_of_step: Moments) -> dict[Category, float]:
    """Return the device memory of parameters, gradients and states at their peak, by category.

    If another moment needs more memory than the end of the backward, for cast, gathered or reduced
    tensors, the difference is added to the category communication.

    Args:
        moments_of_step: Result of ``moments``.
    """
    breakdown = dict(moments_of_step["first block"])
    peak = max(sum(moment.values()) for moment in moments_of_step.values())
    breakdown["communication"] += peak - sum(breakdown.values())
    return breakdown


def streamed_bytes(
    config: RunConfig, layout: Layout, *, total: float, shares: TrainingShares
) -> float:
    """Return the bytes that an update on the device copies there from the host, of all parameters.

    An update on the host copies none. Masters take the place of the parameters, and are on the
    device unless states are offloaded.

    Args:
        config: Configuration of the run.
        layout: Parallel layout of the run.
        total: Parameters of the model, in bytes.
        shares: Sizes of gradients and optimizer states relative to the parameters.
    """
    offload = CPUOffload(config.strategy.fsdp.cpu_offload)
    if not layout.facts.shards_parameters or not offload.streams_the_update:
        return 0.0
    copied = shares.states
    if offload is CPUOffload.PARAMS:
        of_parameters = config.train.parameter_bytes / config.train.gradient_bytes
        has_masters = master_format(config.optimizer) is not None
        copied = shares.gradients * (1 + (0.0 if has_masters else of_parameters))
    return copied * total / layout.tensor / layout.parameter_shards


def _replicated_moments(
    config: RunConfig,
    layout: Layout,
    total: float,
    ends: tuple[float, float],
    shares: TrainingShares,
) -> Moments:
    """Return the moments of a layout in which parameters, gradients and states are replicated.

    Args:
        config: Configuration of the run.
        layout: Parallel layout of the run.
        total: Parameters of the rank, in bytes.
        ends: Parameters outside the layers, in bytes: embeddings, and parameters of products.
        shares: Sizes of gradients and optimizer states relative to the parameters.
    """
    gradients = shares.gradients * total
    accumulated, buckets = (1.0 if _accumulates(layout) else 0.0), 0.0
    before_loss = accumulated if layout.pipeline == 1 or layout.rounds > 1 else 0.0
    if _has_buckets(config, layout):
        # Gradients that accumulate without communication are separate from the buckets.
        before_loss = accumulated or 1.0
        accumulated, buckets = (accumulated, gradients) if accumulated else (1.0, 0.0)
    cast, cast_ends = _cast_bytes(config, total, ends, shares)

    def moment(fraction: float, temporary: float = 0.0) -> dict[Category, float]:
        return _moment(total, fraction * gradients, shares.states * total, buckets, temporary)

    return {
        "loss": moment(before_loss, cast),
        "last block": moment(max(accumulated, _fraction(sum(ends), total)), cast - cast_ends),
        "first block": moment(1),
        "update": moment(1),
    }


def _divided_update_moments(
    config: RunConfig,
    layout: Layout,
    total: float,
    ends: tuple[float, float],
    shares: TrainingShares,
) -> Moments:
    """Return the moments of ZeRO-1; takes the arguments of ``_replicated_moments``."""
    gradients, shard = shares.gradients * total, 1 / layout.optimizer_shards
    # Gradients of the bucket being filled, which are freed afterwards, and buckets being sent.
    in_flight = min(gradients, BUCKET_BYTES) + min(gradients, TRAVELING * BUCKET_BYTES)
    # Gradients in 16 bits are larger in the buckets that sum them in fp32.
    precision = precision_of(config)
    ratio = precision.reduce.nbytes / precision.gradients.nbytes
    growth = 1.0 if sums_as_stored(config) else max(1.0, ratio)
    in_flight *= growth
    cast, cast_ends = _cast_bytes(config, total, ends, shares)
    accumulated = 1.0 if _accumulates(layout) else 0.0
    before_loss = accumulated if layout.pipeline == 1 or layout.rounds > 1 else 0.0

    def moment(
        fraction: float, communication: float, temporary: float = 0.0
    ) -> dict[Category, float]:
        optimizer = shard * shares.states * total
        return _moment(total, fraction * gradients, optimizer, communication, temporary)

    return {
        "loss": moment(before_loss, 0, cast),
        "last block": moment(
            max(accumulated, shard * _fraction(sum(ends), total)),
            0 if accumulated and growth == 1 else in_flight,
            cast - cast_ends,
        ),
        "first block": moment(shard, in_flight),
        # All small parameters are gathered to buckets at the same time.
        "update": moment(0, shares.small * total * (1 + shard)),
    }


def _sharded_moments(
    config: RunConfig,
    layout: Layout,
    total: float,
    full: tuple[float, float],
    ends: tuple[float, float],
    shares: TrainingShares,
) -> Moments:
    """Return the moments of FSDP; takes the arguments of ``_replicated_moments``.

    ``full`` has the bytes of a layer and of all parameters of the rank when they are gathered.
    """
    (layer, all_gathered), (looked_up, multiplied) = full, ends
    compute_ratio, accumulated = _compute_ratio(config), (1.0 if _accumulates(layout) else 0.0)
    offload, shard = config.strategy.fsdp.cpu_offload, 1 / layout.parameter_shards
    parameter_shard = 0.0 if offload in ("params", "full") else shard
    optimizer_shard = 0.0 if offload in ("optimizer_states", "full") else shard
    # Parameters are gathered in the compute type. Gradients exist in that type and as reduced.
    unit_ratio = 1 + compute_ratio
    gathered_ends = multiplied * compute_ratio
    working_layers = _WORKING_LAYERS * layer * compute_ratio + layer * unit_ratio
    end_bytes = max(looked_up, multiplied) * (compute_ratio + unit_ratio)
    gathered = {
        "loss": gathered_ends,
        "last block": gathered_ends + working_layers,
        "first block": max(working_layers, end_bytes),
    }
    first_reduced = _fraction(sum(ends), total)
    if layout.pipeline > 1:
        # A round reduces gradients after its last backward. Until then, all of them are unsharded.
        reduced = all_gathered * compute_ratio
        gathered = {
            "loss": reduced,
            "last block": all_gathered * unit_ratio,
            "first block": reduced + layer,
        }
        accumulated, first_reduced = (1.0 if layout.rounds > 1 else 0.0), 0.0
    elif config.strategy.fsdp.sharding == "shard_grad_op":
        gathered |= {
            "loss": all_gathered * compute_ratio,
            "last block": all_gathered * compute_ratio + layer * unit_ratio,
        }
    gradients = {
        "loss": accumulated,
        "last block": max(accumulated, first_reduced),
        "first block": 1.0,
        "update": 1.0,
    }
    return {
        name: _moment(
            parameter_shard * total,
            fraction * shares.gradients * parameter_shard * total,
            optimizer_shard * shares.states * total,
            gathered.get(name, 0.0),
        )
        for name, fraction in gradients.items()
    }


def _moment(
    parameters: float,
    gradients: float,
    optimizer: float,
    communication: float,
    temporary: float = 0.0,
) -> dict[Category, float]:
    """Return the bytes of one moment by category; activations are counted elsewhere."""
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer,
        "communication": communication,
        "temporary": temporary,
    }


def _cast_bytes(
    config: RunConfig, total: float, ends: tuple[float, float], shares: TrainingShares
) -> tuple[float, float]:
    """Return the bytes of cast parameters at the loss, in total and outside the layers.

    Products keep the cast parameters for backward; recomputed layers cast them again.
    """
    looked_up, multiplied = ends
    ratio = copy_ratio(config)
    is_kept = config.train.recomputation == "none"
    kept = total * (1 - shares.quantized) - looked_up if is_kept else multiplied
    return ratio * kept, ratio * multiplied


def copy_ratio(config: RunConfig) -> float:
    """Return the relative size of a parameter's copy in the compute type; 0 if it needs none."""
    ratio = _compute_ratio(config)
    return ratio if ratio < 1 else 0.0


def _compute_ratio(config: RunConfig) -> float:
    """Return the relative size of a parameter in the compute type, 0.5 for fp32 and bf16."""
    precision = precision_of(config)
    return min(1.0, precision.compute.nbytes / precision.parameters.nbytes)


def _accumulates(layout: Layout) -> bool:
    """Return whether gradients of other micro-batches exist when the last backward begins."""
    return layout.micro_batches > 1 or layout.pipeline > 1


def _has_buckets(config: RunConfig, layout: Layout) -> bool:
    """Return whether torch's DDP averages the gradients, so that its buckets hold all of them."""
    is_plain = layout.tensor == layout.pipeline == 1 and sums_as_stored(config)
    return is_plain and layout.gradient_ranks > 1 and config.strategy.ddp.sync == "overlapped"


def _fraction(part: float, total: float) -> float:
    return min(1.0, part / total) if total else 0.0
