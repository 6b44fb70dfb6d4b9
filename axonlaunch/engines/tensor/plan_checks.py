"""Matches a tensor plan to a model's modules and finds every problem of a plan.

Modules are only read, not changed. They may be on ``meta``, and no other rank is needed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn

from axonlaunch.config.options.adapter import EXPERTS
from axonlaunch.config.problems.did_you_mean import unknown
from axonlaunch.config.problems.errors import divisor_of
from axonlaunch.engines.tensor.parallel_layers.adapters import matrix_shards
from axonlaunch.engines.tensor.parallel_layers.heads import indivisible_heads, key_value_heads
from axonlaunch.engines.tensor.parallel_layers.layer_detection import is_embedding, linear_sizes
from axonlaunch.engines.tensor.parallel_layers.local_parameters import ShardSpec, empty_part
from axonlaunch.models.adapters.expert_lora import LoraExperts
from axonlaunch.models.adapters.lora import LoraLayer
from axonlaunch.models.modules.attention import Attention
from axonlaunch.models.tensors.packed_blocks import BLOCK, format_of, logical_shape

STYLES = (
    *("column", "row", "vocabulary", "sequence", "region", "replicated"),
    *("column_gathered", "row_split", "packed_column", "packed_row", "key_value"),
    *("experts", "averaged", "local", "replicated_summed", "full_sequence"),
)
"""The styles of a plan.

Styles of linear layers and embeddings:

- ``column``: a linear layer with sharded outputs.
- ``row``: a linear layer with sharded inputs; the ranks' results are summed.
- ``vocabulary``: an ``nn.Embedding``, or the head, a linear layer whose logits stay sharded.
- ``column_gathered``: a column layer, or an embedding sharded by features, whose outputs are
  gathered on every rank.
- ``row_split``: a row layer that receives the full inputs.
- ``packed_column``: a column layer whose output is two equal tensors, concatenated;
  ``packed_column/3`` means three tensors.
- ``key_value``: a column layer to key or value heads. If there are fewer heads than ranks, several
  ranks hold the same head.

Styles of other modules:

- ``sequence``: under sequence parallelism the module sees part of the sequence; an ``nn.Embedding``
  (of positions) returns this rank's part.
- ``full_sequence``: under sequence parallelism, the module's first argument is gathered from parts
  of the sequence, it computes as without sequence parallelism, and a part of its result continues.
- ``region``: a parallel region; all column layers in it read its single input.
- ``replicated``: computed in full on every rank. This is also the default of unmatched modules.
- ``replicated_summed``: the same parameters on every rank, outside of a region, but with sharded
  inputs. Gradients are summed, as in a region.
- ``experts``: a module with sharded parameters; its inputs enter a parallel region and its results
  are summed.
- ``local``: a module with sharded parameters between a column and a row layer.
- ``averaged``: a module inside ``experts`` that all ranks compute in full; each rank contributes an
  equal share to the sum.

A pattern can also name a parameter that belongs to no linear layer. ``column`` and
``packed_column`` then shard its second-to-last dim, ``row`` and ``packed_row`` its last. The module
that holds it must have the style ``experts`` or ``local``, or be in a region.
"""
COLUMN_STYLES = ("column", "packed_column", "key_value")
"""Styles of linear layers whose outputs stay sharded."""
ROW_STYLES = ("row", "row_split")
"""Styles of linear layers whose outputs ranks sum."""
_SHARDING_STYLES = ("column", "packed_column", "row", "packed_row")


def split_style(style: str) -> tuple[str, int]:
    """Return a style's name and its number of packed pieces, 3 for ``packed_column/3``."""
    name, _, pieces = style.partition("/")
    if not name.startswith("packed") or (pieces and not (pieces.isdigit() and int(pieces) > 1)):
        return style, 1
    return name, int(pieces or 2)


@dataclass(frozen=True)
class Styled:
    """A module of the tree with the plan's entry for it.

    Attributes:
        name: Full name of the module.
        pattern: First pattern that matches the module; empty if no pattern does.
        style: Style of that pattern; None if no pattern matches.
        in_region: Whether the module is a region or in one, where the ranks' values differ.
        nested: Whether a parent module is a region or in one.
        in_sequence: Whether the module has the style ``sequence``, or no style and a parent with
            that style.
        in_full_sequence: Whether the module has the style ``full_sequence`` or is in such a module.
        holder: Parent module; None for the root.
        pieces: Number of equal pieces packed in its outputs.
        shard_specs: Shards of the sharded parameters that belong directly to the module, by local
            name.
    """

    name: str
    module: nn.Module
    pattern: str
    style: str | None
    in_region: bool
    nested: bool
    in_sequence: bool
    in_full_sequence: bool = False
    holder: nn.Module | None = None
    pieces: int = 1
    shard_specs: Mapping[str, ShardSpec] = field(default_factory=dict)


def style_modules(module: nn.Module, plan: Mapping[str, str]) -> list[Styled]:
    """Return every module of a tree, parents first, with the plan's entry for it."""
    by_name: dict[str, Styled] = {}
    for name, submodule in module.named_modules():
        matching = (p for p in plan if _matches(p, name, submodule, style=plan[p]))
        pattern = next(matching, None)
        style, pieces = (None, 1) if pattern is None else split_style(plan[pattern])
        parent = by_name.get(name.rpartition(".")[0]) if name else None
        nested = parent is not None and parent.in_region
        by_name[name] = Styled(
            name,
            submodule,
            pattern or "",
            style,
            in_region=style == "region" or nested,
            nested=nested,
            in_sequence=style == "sequence"
            or (style is None and parent is not None and parent.in_sequence),
            in_full_sequence=style == "full_sequence"
            or (parent is not None and parent.in_full_sequence),
            holder=parent.module if parent is not None else None,
            pieces=pieces,
            shard_specs=_shard_specs(name, submodule, plan),
        )
    return list(by_name.values())


def _shard_specs(name: str, module: nn.Module, plan: Mapping[str, str]) -> dict[str, ShardSpec]:
    """Return how parameters that belong to no linear layer and no embedding are sharded."""
    shard_specs: dict[str, ShardSpec] = {}
    if _is_layer(module):
        return shard_specs
    for key, parameter in module._parameters.items():
        full_name = f"{name}.{key}".lstrip(".")
        pattern = next((p for p in plan if fnmatchcase(full_name, p)), None)
        style, pieces = split_style(plan[pattern]) if pattern is not None else ("", 1)
        if parameter is None or style not in _SHARDING_STYLES:
            continue
        if style.endswith("column"):
            shard_specs[key] = ShardSpec(max(0, len(logical_shape(parameter)) - 2), pieces)
        elif parameter.ndim > 1:
            shard_specs[key] = ShardSpec(len(logical_shape(parameter)) - 1, pieces)
    return shard_specs


def plan_issues(
    module: nn.Module, plan: Mapping[str, str], *, degree: int, sequence_parallel: bool
) -> list[tuple[str, str]]:
    """Return the reasons why a plan cannot shard a module among ``degree`` ranks.

    Args:
        module: The full model, on any device.
        plan: Maps name patterns to styles.
        degree: Number of ranks on the tensor axis.
        sequence_parallel: Whether norms and similar modules see only part of the sequence.

    Returns:
        List of ``(pattern, message)``, at most one for each pattern. The pattern is empty if the
        problem does not belong to a single one.
    """
    modules = style_modules(module, plan)
    matched_patterns = {entry.pattern for entry in modules}
    matched_patterns |= {
        p
        for p in plan
        for entry in modules
        if entry.shard_specs and _matches(p, entry.name, entry.module)
    }
    issues = unknown_styles(plan)
    issues += [(p, _matches_nothing(p, modules)) for p in plan if p not in matched_patterns]
    return issues + misfits(modules, degree=degree, sequence_parallel=sequence_parallel)


def unknown_styles(plan: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return ``(pattern, message)`` for each style that does not exist."""
    return [
        (p, unknown("style", style, STYLES))
        for p, style in plan.items()
        if split_style(style)[0] not in STYLES
    ]


def misfits(
    modules: list[Styled], *, degree: int, sequence_parallel: bool
) -> list[tuple[str, str]]:
    """Return ``(pattern, message)`` for each matched module that its style does not suit."""
    by_pattern: dict[str, str] = {}
    heads = _head_problems(modules, degree)
    for entry in modules:
        message = _unsuitable(entry, modules) or (None if heads else _indivisible(entry, degree))
        if message is not None:
            by_pattern.setdefault(entry.pattern, message)
    issues = [*by_pattern.items(), *(("", message) for message in heads)]
    issues += [("", message) for message in _tied_differently(modules)]
    if sequence_parallel:
        issues += [("", message) for message in _missing_from_plan(modules)]
    return issues


def _matches(pattern: str, name: str, module: nn.Module, *, style: str = "") -> bool:
    """Return whether a pattern matches a module's name or the name of one of its parameters.

    With a style that shards single parameters, a parameter name of a module that is not a layer
    matches only the parameter, not the module.
    """
    if fnmatchcase(name, pattern):
        return True
    if split_style(style)[0] in _SHARDING_STYLES and not _is_layer(module):
        return False
    return any(
        fnmatchcase(parameter_name, pattern) for parameter_name in _parameter_names(name, module)
    )


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or linear_sizes(module) is not None


def _parameter_names(name: str, module: nn.Module) -> list[str]:
    return [f"{name}.{key}" if name else key for key in module._parameters]


def _matches_nothing(pattern: str, modules: list[Styled]) -> str:
    """Name the earlier pattern that hides this one, or similar module names, numbers as ``*``."""
    for entry in modules:
        if _matches(pattern, entry.name, entry.module):
            return (
                f"{entry.pattern} comes before it and matches {entry.name} too; put this one first"
            )
    names = {re.sub(r"\b\d+\b", "*", entry.name) for entry in modules if entry.name}
    close = difflib.get_close_matches(pattern, sorted(names), n=3, cutoff=0.6)
    if not close:
        close = sorted(name for name in names if "." not in name)
    return f"matches no module and no parameter; the model has {', '.join(close) or 'no parts'}"


def _unsuitable(entry: Styled, modules: list[Styled]) -> str | None:
    named = f"names {entry.name or 'the model itself'}, of type {type(entry.module).__name__}"
    linear, embedding = linear_sizes(entry.module), is_embedding(entry.module)
    if entry.style in ("column", "packed_column", "key_value", "row", "row_split") and not linear:
        return f"{named}; {entry.style} is for nn.Linear with its standard forward and weight"
    if entry.style == "vocabulary" and not (linear or embedding):
        return f"{named}; vocabulary is for nn.Linear and a plain nn.Embedding"
    if entry.style == "column_gathered" and not (linear or embedding):
        return f"{named}; column_gathered is for nn.Linear and a plain nn.Embedding"
    if entry.style in ("column_gathered", "row_split") and entry.nested:
        return f"{named}; it is inside a region, where each rank has only part of its input"
    if entry.style == "key_value" and key_value_heads(entry.holder, entry.module) is None:
        return f"{named}; key_value is for a layer of a module that has a head_dim"
    if entry.style == "region" and entry.nested:
        return f"{named}; it is inside another region, and an input can enter only once"
    if entry.style == "region" and not any(
        other.style in (*COLUMN_STYLES, "vocabulary")
        and other.name.startswith(f"{entry.name}.".lstrip("."))
        for other in modules
    ):
        return f"{named}; a region needs layers of style column, and the plan has none in it"
    if entry.style == "experts":
        unsharded = [
            k
            for k, p in entry.module._parameters.items()
            if p is not None and k not in entry.shard_specs
        ]
        if unsharded or not entry.shard_specs:
            return (
                f"{named}; the plan must shard all its parameters, but not {', '.join(unsharded)}"
            )
    if entry.shard_specs and entry.style not in ("experts", "local") and not entry.in_region:
        return (
            f"names {', '.join(entry.shard_specs)} of {entry.name}; give {entry.name} itself the "
            "style experts if its results are to be summed over ranks, otherwise local"
        )
    return None


def broken_rows(module: nn.Module, plan: Mapping[str, str], *, degree: int) -> Iterator[str]:
    """Yield the parameters with rows that a plan splits within blocks of ``BLOCK`` values.

    Quantized weights are left out: they are frozen and have no optimizer states.

    Args:
        module: The full model, on any device.
        plan: Maps name patterns to styles.
        degree: Number of ranks on the tensor axis.
    """
    for entry in style_modules(module, plan):
        stored = dict(entry.module.named_parameters())
        for key, shard in _row_shards(entry).items():
            parameter = stored[key]
            if format_of(parameter) is not None:
                continue
            of_rank, rest = divmod(parameter.shape[-1], degree * shard.pieces)
            is_row = shard.dim == parameter.ndim - 1 and parameter.ndim > 1
            if is_row and (rest or of_rank % BLOCK):
                yield f"{entry.name}.{key}"


def _row_shards(entry: Styled) -> dict[str, ShardSpec]:
    """Return how a style shards parameters along rows, with those of adapters."""
    shard_specs = dict(entry.shard_specs)
    if _splits_rows(entry):
        shard_specs["weight"] = ShardSpec(1, entry.pieces)
    if isinstance(entry.module, LoraLayer) and entry.style in ROW_STYLES:
        shard_specs["lora_A.weight"] = ShardSpec(1, entry.pieces)
    if isinstance(entry.module, LoraExperts):
        for key, matrices in entry.module.matrices().items():
            if key in entry.shard_specs and (
                of_inputs := matrix_shards(matrices, shard_specs[key])[0]
            ):
                shard_specs[f"{key}{EXPERTS}.lora_A.weight"] = of_inputs
    return shard_specs


def rank_divisors(
    module: nn.Module, plan: Mapping[str, str], *, degree: int
) -> dict[str, tuple[int, int]]:
    """Return by how much a rank's inputs and outputs of each linear layer are fewer.

    Args:
        module: The full model, on any device.
        plan: Maps name patterns to styles.
        degree: Number of ranks on the tensor axis.
    """
    divisors: dict[str, tuple[int, int]] = {}
    for entry in style_modules(module, plan):
        if entry.style in ROW_STYLES:
            divisors[entry.name] = (degree, 1)
        elif entry.style in (*COLUMN_STYLES, "column_gathered"):
            heads = key_value_heads(entry.holder, entry.module)
            shared = entry.style == "key_value" and heads is not None and heads < degree
            divisors[entry.name] = (1, heads if shared and heads is not None else degree)
    return divisors


def _splits_rows(entry: Styled) -> bool:
    """Return whether the style of a linear layer or an embedding splits the rows of its weight."""
    weight = entry.module._parameters.get("weight")
    if weight is None or isinstance(entry.module, nn.Embedding):
        return weight is not None and entry.style == "column_gathered"
    if (sizes := linear_sizes(entry.module)) is None:
        return False
    if entry.style in ROW_STYLES:
        return not sizes.transposed
    return sizes.transposed and entry.style in (*COLUMN_STYLES, "column_gathered")


def _indivisible(entry: Styled, degree: int) -> str | None:
    for key, shard in entry.shard_specs.items():
        parameter = entry.module._parameters[key]
        assert parameter is not None
        if message := _block_problem(f"{entry.name}.{key}", parameter, shard, degree):
            return message
        size = logical_shape(parameter)[shard.dim]
        if size % (degree * shard.pieces):
            use = divisor_of(size // shard.pieces)
            return (
                f"{entry.name}.{key} has size {size} in dim {shard.dim}, which {degree} does not "
                f"divide; use {use}"
            )
    size, unit = _sharded_size(entry)
    if entry.style == "vocabulary":
        return empty_part(f"{entry.name}'s {unit}", size, degree)
    if message := _quantized_layer_problem(entry, degree):
        return message
    heads = key_value_heads(entry.holder, entry.module) if entry.style == "key_value" else None
    if size % (degree * entry.pieces) == 0 or (heads and degree % heads == 0):
        return None
    use = divisor_of(size // entry.pieces)
    return f"{entry.name} has {size} {unit}, which {degree} does not divide; use a degree of {use}"


def _quantized_layer_problem(entry: Styled, degree: int) -> str | None:
    """Return an error message if the style of a linear layer would split a quantized block."""
    weight = entry.module._parameters.get("weight")
    if weight is None or not _splits_rows(entry):
        return None
    return _block_problem(f"{entry.name}.weight", weight, ShardSpec(1, entry.pieces), degree)


def _block_problem(name: str, parameter: Tensor, shard: ShardSpec, degree: int) -> str | None:
    """Return an error message if a shard would end within a block of a quantized parameter."""
    if format_of(parameter) is None or shard.dim != len(logical_shape(parameter)) - 1:
        return None
    blocks = parameter.shape[shard.dim]
    if blocks % (degree * shard.pieces) == 0:
        return None
    use = divisor_of(blocks // shard.pieces)
    return (
        f"{name} has rows of {blocks} quantized blocks of {BLOCK} values, which {degree} does not "
        f"divide; use a degree of {use}, or adapter.base=null"
    )


def _sharded_size(entry: Styled) -> tuple[int, str]:
    """Return the size that a style shards, and its unit."""
    sizes = linear_sizes(entry.module)
    if isinstance(entry.module, nn.Embedding) and entry.style == "vocabulary":
        return entry.module.num_embeddings, "tokens"
    if isinstance(entry.module, nn.Embedding) and entry.style == "column_gathered":
        return entry.module.embedding_dim, "features"
    if sizes is not None:
        if entry.style in (*COLUMN_STYLES, "column_gathered", "vocabulary"):
            return sizes.outputs, "outputs"
        if entry.style in ROW_STYLES:
            return sizes.inputs, "inputs"
    return 0, "sizes"


def holders(modules: Sequence[Styled]) -> list[tuple[nn.Module, dict[str, Styled]]]:
    """Return the modules that hold column-parallel layers, and those layers by attribute name."""
    by_holder: dict[int, tuple[nn.Module, dict[str, Styled]]] = {}
    for entry in modules:
        if entry.style in COLUMN_STYLES and entry.holder is not None:
            columns = by_holder.setdefault(id(entry.holder), (entry.holder, {}))[1]
            columns[entry.name.rpartition(".")[2]] = entry
    return list(by_holder.values())


def shared_heads(columns: Mapping[str, Styled]) -> int | None:
    """Return the number of key-value heads that ranks may share; None without such layers."""
    for entry in columns.values():
        if entry.style == "key_value":
            return key_value_heads(entry.holder, entry.module)
    return None


def _head_problems(modules: list[Styled], degree: int) -> list[str]:
    column_names = {entry.name for entry in modules if entry.style == "column"}
    problems: dict[str, None] = {}
    for entry in modules:
        if (
            isinstance(entry.module, Attention)
            and f"{entry.name}.q_proj".lstrip(".") in column_names
        ):
            heads, kv_heads = entry.module.num_heads, entry.module.num_key_value_heads
            sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
            for name, size in sizes.items():
                if size % degree and not (name == "num_key_value_heads" and kv_heads == heads):
                    use = divisor_of(size)
                    problems[f"{name}={size} is not divisible by it; use {use}"] = None
    for holder, columns in holders(modules):
        layers = {name: entry.module for name, entry in columns.items()}
        shared = shared_heads(columns)
        problems |= dict.fromkeys(indivisible_heads(holder, layers, degree, shared=shared))
    return list(problems)


def _tied_differently(modules: list[Styled]) -> Iterator[str]:
    """Report parameters shared by two modules that have different styles."""
    first: dict[nn.Parameter, tuple[str, str | None]] = {}
    for entry in modules:
        style = entry.style if _sharded_size(entry)[0] else None
        for name, parameter in zip(
            _parameter_names(entry.name, entry.module),
            entry.module._parameters.values(),
            strict=True,
        ):
            if parameter is None:
                continue
            first_name, first_style = first.setdefault(parameter, (name, style))
            if first_style != style:
                yield (
                    f"{name} is {first_name}, and the plan shards them differently "
                    f"({style or 'replicated'} and {first_style or 'replicated'}); give both one "
                    "style"
                )


def _missing_from_plan(modules: list[Styled]) -> Iterator[str]:
    """Report modules whose input may be part of the sequence but that the plan does not name."""
    for entry in modules:
        is_trained = any(
            p is not None and p.requires_grad for p in entry.module._parameters.values()
        )
        is_covered = entry.in_region or entry.in_sequence or entry.in_full_sequence
        if is_trained and entry.style is None and not is_covered:
            yield (
                f"sequence_parallel: the plan does not name {entry.name or 'the model itself'}; "
                "give it the style sequence if it sees only a part of the sequence, otherwise "
                "replicated"
            )
            return
