"""What a rank holds of parameters, gradients and optimizer states in the course of a step.

By closed formulas, as Rajbhandari et al., "ZeRO", 2020, section 3, has them, with what is cast,
gathered and reduced of them meanwhile.
"""

from __future__ import annotations

from typing import TypeAlias

from axonlaunch.comm.gradient_bucket import BUCKET_BYTES
from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout
from axonlaunch.engines.data_parallel.gradient_synchronizer import TRAVELLING
from axonlaunch.models.parameter_facts import TrainingShares
from axonlaunch.planning.tracing.storage_trace import Category

_FP32 = 4
_WORKING_LAYERS = 2
"""Layers that FSDP has gathered at once."""

Moments: TypeAlias = dict[str, dict[Category, float]]
"""Bytes by category, at moments of a step."""


def moments(
    config: RunConfig,
    layout: Layout,
    *,
    whole: float,
    layer: float,
    ends: float,
    shares: TrainingShares,
) -> Moments:
    """Return what a rank holds beside activations at the moments that may be a step's peak.

    They are those of its last backward, ``loss``, ``last block`` and ``first block``, in this
    order, and ``update``.

    Args:
        config: The layout's run.
        layout: Its layout.
        whole: The parameters of the rank's stages, undivided by other axes, in bytes.
        layer: Of these, those of a layer.
        ends: Of these, those of no layer.
        shares: Of what training keeps beside the parameters.
    """
    whole, layer, ends = (size / layout.tensor for size in (whole, layer, ends))
    looked_up = min(ends, shares.looked_up * whole)
    if layout.facts.shards_parameters:
        return _of_shards(config, layout, whole, layer, (looked_up, ends - looked_up), shares)
    if layout.facts.divides_update and layout.gradient_ranks > 1:
        return _of_divided_update(config, layout, whole, (looked_up, ends - looked_up), shares)
    return _of_replicas(config, layout, whole, (looked_up, ends - looked_up), shares)


def states(of_step: Moments) -> dict[Category, float]:
    """Return what states take of a rank's device, once it has all of its gradients, in bytes.

    As communication it has what another moment takes more: what is cast, gathered or reduced.

    Args:
        of_step: What ``moments`` gave.
    """
    held = dict(of_step["first block"])
    most = max(sum(moment.values()) for moment in of_step.values())
    held["communication"] += most - sum(held.values())
    return held


def _of_replicas(
    config: RunConfig,
    layout: Layout,
    whole: float,
    ends: tuple[float, float],
    shares: TrainingShares,
) -> Moments:
    """Return the moments of whole parameters, gradients and states.

    Args:
        config: The layout's run.
        layout: Its layout.
        whole: Parameters that the rank has a part of, in bytes.
        ends: Of these, those of no layer: what is looked up, and what is multiplied with.
        shares: Of what training keeps beside the parameters.
    """
    gradients = shares.gradients * whole
    begun, buckets = (1.0 if _adds_up(layout) else 0.0), 0.0
    if _has_buckets(config, layout):
        # What adds up without being sent adds up beside the buckets, which stay.
        is_apart = begun or not config.strategy.ddp.gradient_as_bucket_view
        begun, buckets = (begun, gradients) if is_apart else (1.0, 0.0)
    cast, cast_of_ends = _cast(config, whole, ends)

    def moment(part: float, temporary: float = 0.0) -> dict[Category, float]:
        return _moment(whole, part * gradients, shares.states * whole, buckets, temporary)

    return {
        "loss": moment(begun, cast),
        "last block": moment(max(begun, _share(sum(ends), whole)), cast - cast_of_ends),
        "first block": moment(1),
        "update": moment(1),
    }


def _of_divided_update(
    config: RunConfig,
    layout: Layout,
    whole: float,
    ends: tuple[float, float],
    shares: TrainingShares,
) -> Moments:
    """Return the moments of ZeRO-1; arguments as ``_of_replicas`` takes them."""
    gradients, rows = shares.gradients * whole, 1 / layout.optimizer_shards
    # Gradients of the bucket that is filled, which are then freed, and what is sent.
    sent = min(gradients, BUCKET_BYTES) + min(gradients, TRAVELLING * BUCKET_BYTES)
    cast, cast_of_ends = _cast(config, whole, ends)
    begun = 1.0 if _adds_up(layout) else 0.0

    def moment(part: float, communication: float, temporary: float = 0.0) -> dict[Category, float]:
        optimizer = rows * shares.states * whole
        return _moment(whole, part * gradients, optimizer, communication, temporary)

    return {
        "loss": moment(begun, 0, cast),
        "last block": moment(
            max(begun, rows * _share(sum(ends), whole)), 0 if begun else sent, cast - cast_of_ends
        ),
        "first block": moment(rows, sent),
        # Small parameters are gathered to buckets, all at once.
        "update": moment(0, shares.small * whole * (1 + rows)),
    }


def _of_shards(
    config: RunConfig,
    layout: Layout,
    whole: float,
    layer: float,
    ends: tuple[float, float],
    shares: TrainingShares,
) -> Moments:
    """Return the moments of FSDP; arguments as ``_of_replicas`` takes them, ``layer`` as well."""
    looked_up, multiplied = ends
    half, begun = _lower(config), (1.0 if _adds_up(layout) else 0.0)
    offload, shard = config.strategy.fsdp.cpu_offload, 1 / layout.parameter_shards
    on_device = 0.0 if offload in ("params", "full") else shard
    states_there = 0.0 if offload in ("optimizer_states", "full") else shard
    # Gathered in the type of the products; its gradient in that too, and as it is summed.
    a_unit = 1 + half
    read = multiplied * half
    working = _WORKING_LAYERS * layer * half + layer * a_unit
    of_end = max(looked_up, multiplied) * (half + a_unit)
    gathered = {"loss": read, "last block": read + working, "first block": max(working, of_end)}
    if layout.pipeline > 1:
        gathered = dict.fromkeys(gathered, whole * a_unit)
    elif config.strategy.fsdp.sharding == "shard_grad_op":
        gathered |= {"loss": whole * half, "last block": whole * half + layer * a_unit}
    gradients = {
        "loss": begun,
        "last block": max(begun, _share(sum(ends), whole)),
        "first block": 1.0,
        "update": 1.0,
    }
    return {
        name: _moment(
            on_device * whole,
            part * shares.gradients * on_device * whole,
            states_there * shares.states * whole,
            gathered.get(name, 0.0),
        )
        for name, part in gradients.items()
    }


def _moment(
    parameters: float,
    gradients: float,
    optimizer: float,
    communication: float,
    temporary: float = 0.0,
) -> dict[Category, float]:
    """Return what is held at a moment, in bytes by category; activations are counted elsewhere."""
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer,
        "communication": communication,
        "temporary": temporary,
    }


def _cast(config: RunConfig, whole: float, ends: tuple[float, float]) -> tuple[float, float]:
    """Return what is cast of whole parameters at the loss, and of that what the ends' are.

    It is kept for backward by the products that read it; a layer that is recomputed casts again.
    """
    looked_up, multiplied = ends
    half = _lower(config)
    if half == 1:
        return 0.0, 0.0
    is_kept = config.train.activation_checkpointing == "none"
    return half * (whole - looked_up if is_kept else multiplied), half * multiplied


def _lower(config: RunConfig) -> float:
    """Return what products read of a parameter beside what is kept of it: 0.5 of fp32 in bf16."""
    is_cast = config.train.precision != "fp32" and config.train.parameter_bytes == _FP32
    return 0.5 if is_cast else 1.0


def _adds_up(layout: Layout) -> bool:
    """Say whether gradients of other micro-batches are there when the last backward begins."""
    return layout.micro_batches > 1 or layout.pipeline > 1


def _has_buckets(config: RunConfig, layout: Layout) -> bool:
    """Say whether gradients are averaged by torch's DDP, whose buckets hold all of them."""
    is_plain = layout.tensor == layout.pipeline == 1 and config.strategy.reduce_dtype == "fp32"
    return is_plain and layout.gradient_ranks > 1 and config.strategy.ddp.sync == "overlapped"


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole else 0.0
