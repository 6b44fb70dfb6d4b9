"""Divides the traced activations of a layer among the ranks that share it.

Activations are divided as in Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, section 4. All sizes are bytes of one sample, or of a rank's part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.planning.throughput.operations import Product
from axonlaunch.planning.throughput.step_work import SAMPLES, StepWork

REGIONS = 2
"""Regions of tensor parallelism in a dense layer: attention and feed-forward."""
_REPLICATED = 4
"""Hidden states of a layer that each tensor rank keeps, without sequence parallelism.

They are the inputs and the outputs of its two norms. Shared experts keep one more: their input,
which routed experts need only in the order of the experts.
"""
_REPLICATED_ROWS = 2
"""Rows of experts with the width of hidden states that each tensor rank keeps.

They are the inputs of experts, and their results in the order of the tokens.
"""
_REPLICATED_BY_ROUTER = 2
"""Hidden states in 16 bits that each tensor rank keeps for a router: its input in fp32."""
_LARGE_GRADIENTS = 2
"""Gradients that exist beside each other within a layer, of the size of its largest product.

They are those of the outputs of a layer's nonlinearity and of a product before it.
"""


@dataclass(frozen=True)
class ActivationBytes:
    """Activations of one sample on one device, in bytes, at the peak of a step.

    Attributes:
        layer: Activations of one repeated layer.
        ends: Activations outside the layers.
        leading: Activations of one layer before the repeated ones.
        dispatched: The part of a layer with divided experts that grows with the tokens of the
            experts, for a balanced router.
        undispatched: The rest of a layer with divided experts.
        regions: Regions of tensor parallelism in a repeated layer, whose results ranks sum.
    """

    layer: float
    ends: float
    leading: float = 0.0
    dispatched: float = 0.0
    undispatched: float = 0.0
    regions: int = REGIONS


@dataclass(frozen=True)
class LayerBytes:
    """Memory of a rank for a sample in each of its layers.

    Attributes:
        kept: Activations that a repeated layer keeps for backward.
        kept_leading: Activations that a layer before the repeated ones keeps.
        recomputed: Additional activations of the layer whose backward runs; 0 without
            recomputation.
        transient: Gradients of activations within the layer whose backward runs.
        awaiting: Gradients that a layer keeps from the backward of its inputs to that of its
            weights, if a schedule separates them.
        message: Hidden states that pass between stages.
    """

    kept: float
    kept_leading: float
    recomputed: float
    transient: float
    awaiting: float
    message: float


def layer_bytes(
    config: RunConfig,
    layout: Layout,
    *,
    work: StepWork,
    activations: Mapping[str, ActivationBytes],
    expert_load: float,
    has_leading: bool,
) -> LayerBytes:
    """Return the activations of a rank's layers.

    Args:
        config: Configuration of the run.
        layout: Parallel layout of the run.
        work: Work on one device.
        activations: Activations of one sample for each kind of recomputation.
        expert_load: Load of a rank's experts relative to a balanced one; 0 if experts are not
            divided.
        has_leading: Whether the rank has layers before the repeated ones.
    """
    mode, tensor = config.train.recomputation, layout.tensor
    in_parts = config.strategy.tensor.sequence_parallel
    itemsize = PRECISIONS[config.train.precision].compute.nbytes
    hidden = work.hidden_size * work.sample_length * itemsize
    saved, complete = activations[mode], activations["none"]

    outputs = _Outputs.of(work)
    rows = outputs.expert_rows * work.hidden_size * itemsize
    of_experts = _REPLICATED_ROWS * rows + (_REPLICATED_BY_ROUTER * hidden if rows else 0.0)

    def divide(num_bytes: float, replicated: float, *, with_experts: bool = False) -> float:
        """Divide activations, of which hidden states are replicated unless they are in parts.

        Rows of experts are never in parts.
        """
        part = 0.0 if in_parts else replicated * hidden
        part = min(num_bytes, part + (of_experts if with_experts else 0.0))
        return part + (num_bytes - part) / tensor

    # Every second product is saved. The last one of a layer is a sum over tensor ranks.
    saves_sum = mode == "selective" and outputs.count % 2 == 1
    regions = saved.regions * hidden
    extra = _tensor_extra(mode, regions, tensor=tensor, in_parts=in_parts)
    extra += hidden * (1 - 1 / tensor) if saves_sum else 0.0
    replicated = _REPLICATED + saved.regions - REGIONS
    inputs = replicated if mode == "none" else 1  # recomputation keeps the input of a layer
    kept = divide(saved.layer, inputs, with_experts=mode == "none")
    kept_leading = divide(saved.leading, min(inputs, _REPLICATED))
    recomputed = divide(complete.layer, replicated, with_experts=True)
    if expert_load:
        kept, recomputed = (
            divide(part.undispatched, hidden_states) + expert_load / tensor * part.dispatched
            for part, hidden_states in ((saved, inputs), (complete, replicated))
        )
    if has_leading:
        recomputed = max(recomputed, divide(complete.leading, _REPLICATED))
    recomputed += _tensor_extra("none", regions, tensor=tensor, in_parts=in_parts)
    recomputed = 0.0 if mode == "none" else recomputed
    kept, kept_leading = kept + extra, kept_leading + extra
    if config.train.offloads_inputs:
        # Full recomputation stores the inputs of layers. Two of them are on the device in backward.
        stored = activations["full"].layer / (tensor if in_parts else 1)
        kept, kept_leading = max(0.0, kept - stored), max(0.0, kept_leading - stored)
        recomputed += 2 * stored
    # Outputs of products that are summed over tensor ranks have all features on each of them.
    summed = regions * (1 - 1 / tensor)
    return LayerBytes(
        kept,
        kept_leading,
        recomputed,
        transient=_LARGE_GRADIENTS * max(outputs.largest / tensor, rows),
        awaiting=outputs.total / tensor + min(outputs.total, summed),
        message=hidden / (tensor if in_parts else 1),
    )


def _tensor_extra(mode: str, regions: float, *, tensor: int, in_parts: bool) -> float:
    """Return what tensor ranks keep of a layer in addition to their parts of its activations.

    Its regions keep their inputs with all positions. Selective recomputation also keeps the results
    of collectives.

    Args:
        mode: Kind of recomputation.
        regions: Hidden states of all regions.
        tensor: Number of tensor ranks.
        in_parts: Whether each rank has a part of the positions outside regions.
    """
    if tensor == 1 or mode == "full":
        return 0.0
    if mode == "none":
        return regions * (1 - 1 / tensor) if in_parts else 0.0
    return regions * ((1 + 1 / tensor) if in_parts else 1)


@dataclass(frozen=True)
class _Outputs:
    """Outputs of the products of a layer's forward, for one sample on one device.

    Attributes:
        count: Number of products.
        largest: Bytes of the largest output.
        total: Bytes of all outputs.
        expert_rows: Rows of the experts; 0 without experts.
    """

    count: int
    largest: float
    total: float
    expert_rows: float

    @classmethod
    def of(cls, work: StepWork) -> Self:
        count = largest = total = rows = 0.0
        for key, amount in work.first.micro_layer.work.items():
            if isinstance(key, Product) and key.phase == "forward":
                num_bytes = key.batch * key.m * key.n * max(2, key.dtype.itemsize) / SAMPLES
                count += amount.count
                largest = max(largest, num_bytes)
                total += amount.count * num_bytes
                rows = max(rows, key.batch * key.m / SAMPLES if key.tokens == "m" else 0.0)
        return cls(round(count), largest, total, rows)
