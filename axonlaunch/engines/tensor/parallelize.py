"""Shards a model among the ranks of a tensor axis as described by a plan.

A plan maps patterns of module names to styles. The model is ordinary single-device code and keeps
its parameter names. If a style does not suit a module, an error is raised before anything changes.

Source: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation
Recomputation", 2022, for sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import (
    all_reduce_from_group,
    collect_from,
    copy_to_group,
    scatter_to_group,
)
from axonlaunch.comm.checks.argument_checks import device_of
from axonlaunch.comm.mesh import Mesh
from axonlaunch.comm.process_group import default_group
from axonlaunch.engines.tensor.parallel_layers.adapters import shard_adapter, shard_experts
from axonlaunch.engines.tensor.parallel_layers.fused_region import SEQUENCE_DIM, ColumnParallelGroup
from axonlaunch.engines.tensor.parallel_layers.heads import key_value_heads, set_local_head_counts
from axonlaunch.engines.tensor.parallel_layers.layer_detection import LinearSizes, linear_sizes
from axonlaunch.engines.tensor.parallel_layers.layers import (
    ColumnParallelEmbedding,
    ColumnParallelLinear,
    RowParallelLinear,
    SharedHeadsLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from axonlaunch.engines.tensor.parallel_layers.local_parameters import (
    ReadsLocally,
    ShardSpec,
    TensorAxis,
)
from axonlaunch.engines.tensor.plan_checks import (
    COLUMN_STYLES,
    STYLES,
    Styled,
    holders,
    misfits,
    shared_heads,
    style_modules,
    unknown_styles,
)
from axonlaunch.models.modules.convert_module import convert_module, first_argument

__all__ = ["STYLES", "sharded_classes", "parallelize"]


def parallelize(
    module: nn.Module,
    plan: Mapping[str, str],
    *,
    mesh: DeviceMesh | None = None,
    sequence_parallel: bool = False,
    overlap: bool = True,
) -> None:
    """Shard a module in place; afterwards every parameter is a DTensor on ``mesh``.

    A replicated parameter inside a region gets the sum of the ranks' gradients, because each rank
    sees only some heads or features there. Outside of regions all ranks see the same values and no
    sum is needed, except with the style ``sequence``.

    Args:
        module: A model or a pipeline stage, identical on every rank or on ``meta``.
        plan: Maps patterns (``*`` matches dots too) to styles, see ``STYLES``. The first matching
            pattern counts. A pattern matches a module's full name or the name of one of its
            parameters. Patterns that match nothing are ignored, so a plan for the full model can be
            applied to a stage.
        mesh: One-dimensional mesh of the tensor axis; None for all ranks of the world. For use
            with FSDP it must be a slice of the run's mesh, ``world.mesh(...).device_mesh["tp"]``.
        sequence_parallel: Shard hidden states [B, T, H] along T outside of regions.
        overlap: Compute a region's weight gradients while its input gradient is summed. Must be
            false if the backward passes for inputs and for weights run at different times.

    Raises:
        ValueError: A style does not exist or does not suit its module, or a size is not divisible;
            or ``mesh`` is None and there is no world.
    """
    if mesh is None:
        world = default_group()
        sizes, device = {"tp": world.size}, device_of(world).type
        mesh = Mesh(sizes, rank=world.rank, device_type=device).device_mesh
    if mesh.ndim != 1:
        raise ValueError(f"the mesh {mesh} has {mesh.ndim} dims; pass only the tensor axis")
    shard_module(
        module, plan, TensorAxis(mesh, overlaps=overlap), sequence_parallel=sequence_parallel
    )


def shard_module(
    module: nn.Module, plan: Mapping[str, str], axis: TensorAxis, *, sequence_parallel: bool = False
) -> None:
    """Shard a module among the ranks of an axis, as ``parallelize`` does.

    Raises:
        ValueError: A style does not exist or does not suit its module, or a size is not divisible.
    """
    styled = style_modules(module, plan)
    # Experts that are sharded over another axis read their parameters themselves.
    modules = [entry for entry in styled if not isinstance(entry.module, ReadsLocally)]
    issues = unknown_styles(plan)
    issues += misfits(modules, degree=axis.group.size, sequence_parallel=sequence_parallel)
    if issues:
        raise ValueError(
            "; ".join(f"{pattern}: {message}".lstrip(": ") for pattern, message in issues)
        )
    _shard_heads(modules, axis.group.size)
    for entry in modules:
        _apply(entry, axis, sequence_parallel=sequence_parallel)
    for entry in modules:
        _shard_adapter(entry, axis)
    _share_regions(modules, axis, sequence_parallel=sequence_parallel)
    axis.distribute(module)


def without_modules(
    plan: Mapping[str, str], model: nn.Module, names: Iterable[str]
) -> dict[str, str]:
    """Return a plan without the patterns that match some modules or their direct parameters.

    Args:
        plan: Maps patterns to styles.
        model: Model with the modules.
        names: Full names of the modules; names that a stage lacks are skipped.
    """
    modules = dict(model.named_modules())
    matched = {
        full_name
        for name in names
        if name in modules
        for full_name in (name, *(f"{name}.{key}" for key in modules[name]._parameters))
    }
    return {
        pattern: style
        for pattern, style in plan.items()
        if not any(fnmatchcase(name, pattern) for name in matched)
    }


def sharded_classes(module: nn.Module) -> int | None:
    """Return the number of classes of a head whose logits are sharded; None for full logits."""
    heads = (part for part in module.modules() if isinstance(part, VocabParallelHead))
    return next((head.out_features for head in heads), None)


class _EntersRegion(ReadsLocally):
    """Brings its first argument into the parallel region."""

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


class _FullSequence(ReadsLocally):
    """Gathers its first argument from parts of the sequence, and returns this rank's part.

    All ranks compute the same on the full sequence, so gradients are complete on each of them.
    Hidden states are [B, T, H]; a result may also be [B * T, H].
    """

    _input: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        group = self._axis.group
        if args:
            full = collect_from(args[0], group, SEQUENCE_DIM)
            result = super().forward(full, *args[1:], **kwargs)
        else:
            full = collect_from(kwargs[self._input], group, SEQUENCE_DIM)
            result = super().forward(**{**kwargs, self._input: full})
        if isinstance(result, tuple):  # hidden states, then attention weights or router logits
            return (self._part_of(result[0], full), *result[1:])
        return self._part_of(result, full)

    def _part_of(self, result: Tensor, full: Tensor) -> Tensor:
        """Return this rank's part of a result, in the shape of the result."""
        rows = result.unflatten(0, full.shape[:2]) if result.ndim < full.ndim else result
        part = scatter_to_group(rows, self._axis.group, SEQUENCE_DIM)
        return part.flatten(0, 1) if result.ndim < full.ndim else part


class _SequenceOfPositions(ReadsLocally):
    """Returns this rank's part of the positions; backward gathers their gradients."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        vectors: Tensor = super().forward(*args, **kwargs)
        return scatter_to_group(vectors, self._axis.group, -2)


class _Experts(ReadsLocally):
    """Experts with sharded parameters; their partial results are summed over ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        group = self._axis.group
        args = tuple(_enter_region(value, group) for value in args)
        kwargs = {key: _enter_region(value, group) for key, value in kwargs.items()}
        result = super().forward(*args, **kwargs)
        if not isinstance(result, Tensor):
            kind = type(self).__name__
            raise TypeError(f"{kind} returns {type(result).__name__}; experts return a tensor")
        return all_reduce_from_group(result, group)


class _Averaged(ReadsLocally):
    """Divides a result that every rank computes by the number of ranks, before a sum over ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) / self._axis.group.size


def _enter_region(value: Any, group: ProcessGroup) -> Any:
    """Bring a floating-point tensor (hidden states, router weights) into the region."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return copy_to_group(value, group)
    return value


def _apply(entry: Styled, axis: TensorAxis, *, sequence_parallel: bool) -> None:
    """Convert a module to the parallel class of its style."""
    module, style = entry.module, entry.style
    gathers = sequence_parallel and style == "full_sequence"
    # Modules in a full sequence compute as without sequence parallelism.
    sequence_parallel = sequence_parallel and not entry.in_full_sequence
    sizes = linear_sizes(module)
    module.__dict__.update({"shard_specs": dict(entry.shard_specs)} if entry.shard_specs else {})
    if style in (*COLUMN_STYLES, "column_gathered", "vocabulary") and sizes is not None:
        _shard_outputs(entry, sizes, axis, sequence_parallel=sequence_parallel)
    elif style in ("row", "row_split") and sizes is not None:
        row = convert_module(_set_sizes(module, sizes), RowParallelLinear)
        row.axis, row.sequence_parallel = axis, sequence_parallel
        row.input_is_parallel, row.transposed = style == "row", sizes.transposed
        row.__dict__["shard_specs"] = {
            "weight": ShardSpec(0 if sizes.transposed else 1, entry.pieces)
        }
    elif style == "vocabulary":
        embedding = convert_module(
            module, VocabParallelEmbedding, beneath=_has_custom_forward(module)
        )
        embedding.axis, embedding.sequence_parallel = axis, sequence_parallel
    elif style == "column_gathered":
        convert_module(
            module, ColumnParallelEmbedding, beneath=_has_custom_forward(module)
        ).axis = axis
    elif gathers:
        module.__dict__.update(_axis=axis, _sums_gradients=False, _input=first_argument(module))
        convert_module(module, _FullSequence)
    elif _reads_parameters(module) or style == "averaged":
        _read_locally(entry, axis, sequence_parallel=sequence_parallel)


def _shard_outputs(
    entry: Styled, sizes: LinearSizes, axis: TensorAxis, *, sequence_parallel: bool
) -> None:
    """Convert a linear layer to one that computes this rank's outputs."""
    kind: type[ColumnParallelLinear] = ColumnParallelLinear
    heads = key_value_heads(entry.holder, entry.module) if entry.style == "key_value" else None
    shared = heads is not None and heads < axis.group.size
    if shared:
        kind = SharedHeadsLinear
    elif entry.style == "vocabulary":
        kind = VocabParallelHead
    column = convert_module(_set_sizes(entry.module, sizes), kind)
    column.axis, column.transposed = axis, sizes.transposed
    column.enters = not entry.in_region
    column.gather_output = entry.style == "column_gathered"
    column.region = ColumnParallelGroup(axis, [column], sequence_parallel=sequence_parallel)
    if isinstance(column, SharedHeadsLinear):
        assert heads is not None
        column.heads = heads
    else:
        weight = ShardSpec(1 if sizes.transposed else 0, entry.pieces)
        column.__dict__["shard_specs"] = {"weight": weight, "bias": ShardSpec(0, entry.pieces)}


def _shard_adapter(entry: Styled, axis: TensorAxis) -> None:
    """Shard a layer's adapter in the same way as the layer."""
    shard_experts(entry.module, axis, shard_specs=entry.shard_specs)
    if isinstance(entry.module, SharedHeadsLinear):
        shard_adapter(entry.module, axis)
    elif isinstance(entry.module, ColumnParallelLinear):
        shard_adapter(entry.module, axis, outputs=ShardSpec(0, entry.pieces))
    elif isinstance(entry.module, RowParallelLinear):
        shard_adapter(entry.module, axis, inputs=ShardSpec(1, entry.pieces))


def _set_sizes(module: nn.Module, sizes: LinearSizes) -> nn.Module:
    """Set the sizes as ``nn.Linear`` does, on a module that computes a linear layer."""
    module.__dict__.update(in_features=sizes.inputs, out_features=sizes.outputs)
    return module


def _has_custom_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Embedding.forward


def _read_locally(entry: Styled, axis: TensorAxis, *, sequence_parallel: bool) -> None:
    """Let a module's original forward compute with this rank's shards of its parameters."""
    module = entry.module
    is_embedding = isinstance(module, nn.Embedding)
    positions = sequence_parallel and entry.style == "sequence" and is_embedding
    sums_gradients = entry.in_region or (sequence_parallel and entry.in_sequence and not positions)
    kind: type[ReadsLocally] = _SequenceOfPositions if positions else ReadsLocally
    if entry.style == "region":
        kind = _EntersRegion
        module.__dict__["_input"] = first_argument(module)
    elif entry.style in ("experts", "averaged"):
        kind = _Experts if entry.style == "experts" else _Averaged
    sums_gradients = sums_gradients or entry.style == "replicated_summed"
    module.__dict__.update(_axis=axis, _sums_gradients=sums_gradients)
    convert_module(module, kind)


def _shard_heads(modules: Sequence[Styled], degree: int) -> None:
    """Set head counts and widths to this rank's in modules that hold column-parallel layers."""
    for holder, columns in holders(modules):
        outputs = [
            sizes.outputs // entry.pieces
            for entry in columns.values()
            if (sizes := linear_sizes(entry.module)) is not None
        ]
        set_local_head_counts(holder, outputs, degree=degree, shared=shared_heads(columns))


def _share_regions(modules: Sequence[Styled], axis: TensorAxis, *, sequence_parallel: bool) -> None:
    """Let the column layers of a region share the collective of their common input."""
    for entry in modules:
        container = entry.module
        if isinstance(container, _EntersRegion):
            layers = container.modules()
            columns = [layer for layer in layers if isinstance(layer, ColumnParallelLinear)]
            has_parts = sequence_parallel and not entry.in_full_sequence
            region = ColumnParallelGroup(axis, columns, sequence_parallel=has_parts)
            container.region = region
            for column in columns:
                column.region = region


def _reads_parameters(module: nn.Module) -> bool:
    """Return whether a module's forward reads parameters, its direct ones or those of children."""
    if any(parameter is not None for parameter in module._parameters.values()):
        return True
    has_forward = type(module).forward is not nn.Module.forward
    return has_forward and next(module.parameters(), None) is not None
