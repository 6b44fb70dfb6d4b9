"""Divides a whole model among the ranks of a tensor axis, by a plan and from outside.

A plan maps patterns of names to styles; the model is plain code for one device and keeps its
names. What a plan can't do to a module is refused before anything is changed.

Source: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation
Recomputation", 2022, for sequence parallelism.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from axonlaunch.comm.autograd import scatter_to_group
from axonlaunch.engines.tensor.fused_region import ColumnParallelGroup
from axonlaunch.engines.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from axonlaunch.engines.tensor.local_parameters import ReadsLocally, TensorAxis, convert_module
from axonlaunch.engines.tensor.plan_checks import (
    STYLES,
    Styled,
    misfits,
    styled,
    unknown_styles,
)

__all__ = ["STYLES", "has_divided_logits", "parallelize"]


def parallelize(
    module: nn.Module,
    plan: Mapping[str, str],
    *,
    mesh: DeviceMesh,
    sequence_parallel: bool = False,
    overlap: bool = True,
) -> None:
    """Divide a module in place; every parameter is a DTensor on ``mesh`` afterwards.

    A replicated parameter inside a region gets the sum of the ranks' gradients, for each rank
    sees some heads or features there. Outside of one, ranks see the same and no sum is needed,
    but for what has the style ``sequence``.

    Args:
        module: A model, or a pipeline stage of one, the same on every rank or on ``meta``.
        plan: Pattern of names (``*`` matches dots too) to style, see ``STYLES``; of several that
            match, the first counts. A pattern matches a module's full name, or that of a
            parameter of its. Those that match nothing are passed over, so a plan for the whole
            model serves a stage.
        mesh: The tensor axis: one-dimensional, or a slice of the run's mesh, which FSDP asks for.
        sequence_parallel: Keep hidden states [B, T, H] outside of regions as parts along T.
        overlap: Compute gradients of a region's weights while that of its input is summed; false
            for who goes back to inputs and to weights at different times.

    Raises:
        ValueError: A style does not exist or does not suit, or a size is not divisible.
    """
    if mesh.ndim != 1:
        raise ValueError(f"the mesh {mesh} has {mesh.ndim} dims; pass the tensor axis alone")
    axis = TensorAxis(mesh, overlaps=overlap)
    modules = styled(module, plan)
    wrong = unknown_styles(plan)
    wrong += misfits(modules, degree=axis.group.size, sequence_parallel=sequence_parallel)
    if wrong:
        raise ValueError(
            "; ".join(f"{pattern}: {message}".lstrip(": ") for pattern, message in wrong)
        )
    for one in modules:
        _apply(one, axis, sequence_parallel=sequence_parallel)
    _share_regions(module, axis, sequence_parallel=sequence_parallel)
    axis.distribute(module)


def has_divided_logits(module: nn.Module) -> bool:
    """Say whether a module returns this rank's logits alone, for the vocabulary-parallel loss."""
    return any(isinstance(part, VocabParallelHead) for part in module.modules())


class _EntersRegion(ReadsLocally):
    """Takes its first argument into the parallel region."""

    region: ColumnParallelGroup
    _input: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if args:
                return super().forward(self.region.enter(args[0]), *args[1:], **kwargs)
            entered = self.region.enter(kwargs[self._input])
            return super().forward(**{**kwargs, self._input: entered})
        finally:
            self.region.leave()


class _SequenceOfPositions(ReadsLocally):
    """Returns this rank's part of the positions; going back, all of them are gathered."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        vectors: Tensor = super().forward(*args, **kwargs)
        return scatter_to_group(vectors, self._axis.group, -2)


def _apply(one: Styled, axis: TensorAxis, *, sequence_parallel: bool) -> None:
    """Give a module the class that computes as its style says."""
    module = one.module
    is_embedding = isinstance(module, nn.Embedding)
    if one.style in ("column", "vocabulary") and not is_embedding:
        is_head = one.style == "vocabulary"
        column = convert_module(module, VocabParallelHead if is_head else ColumnParallelLinear)
        column.axis, column.enters = axis, not one.in_region
        column.region = ColumnParallelGroup(axis, [column], sequence_parallel=sequence_parallel)
    elif one.style == "row":
        row = convert_module(module, RowParallelLinear)
        row.axis, row.sequence_parallel = axis, sequence_parallel
    elif one.style == "vocabulary":
        embedding = convert_module(module, VocabParallelEmbedding)
        embedding.axis, embedding.sequence_parallel = axis, sequence_parallel
    elif _computes(module):
        positions = sequence_parallel and one.style == "sequence" and is_embedding
        summed = one.in_region or (sequence_parallel and one.in_sequence and not positions)
        kind: type[ReadsLocally] = _SequenceOfPositions if positions else ReadsLocally
        if one.style == "region":
            kind = _EntersRegion
            module.__dict__["_input"] = next(iter(inspect.signature(module.forward).parameters))
        module.__dict__.update(_axis=axis, _sums_gradients=summed)
        convert_module(module, kind)


def _share_regions(module: nn.Module, axis: TensorAxis, *, sequence_parallel: bool) -> None:
    """Let the column layers inside of a region compute together."""
    for container in module.modules():
        if isinstance(container, _EntersRegion):
            columns = [one for one in container.modules() if isinstance(one, ColumnParallelLinear)]
            region = ColumnParallelGroup(axis, columns, sequence_parallel=sequence_parallel)
            container.region = region
            for column in columns:
                column.region = region


def _computes(module: nn.Module) -> bool:
    """Say whether a module reads parameters in its forward, its own or its children's."""
    if any(parameter is not None for parameter in module._parameters.values()):
        return True
    has_forward = type(module).forward is not nn.Module.forward
    return has_forward and next(module.parameters(), None) is not None
