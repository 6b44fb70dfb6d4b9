"""What a tensor plan says of a module, and everything that is wrong with a plan.

It reads modules, on ``meta`` too, and changes none; no rank needs to be there.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from axonlaunch.config.did_you_mean import unknown
from axonlaunch.config.errors import divisor_of
from axonlaunch.engines.tensor.heads import indivisible_heads, key_value_heads
from axonlaunch.engines.tensor.kinds import is_embedding, linear_sizes
from axonlaunch.engines.tensor.local_parameters import Cut, empty_part
from axonlaunch.models.attention import Attention

STYLES = (
    *("column", "row", "vocabulary", "sequence", "region", "replicated"),
    *("column_gathered", "row_split", "packed_column", "packed_row", "key_value"),
    *("experts", "averaged", "local", "replicated_summed"),
)
"""The styles of a plan.

``column``: a linear layer whose outputs are divided and stay so. ``row``: one whose inputs are
divided; the results are summed. ``vocabulary``: an ``nn.Embedding`` or the head, a linear layer
whose logits stay divided. ``sequence``: under sequence parallelism it sees a part of the
sequence; an ``nn.Embedding`` (of positions) gives its part. ``region``: its column layers all
read its one input. ``replicated``: every rank computes all of it, as it does of what no pattern
names.

``column_gathered``: a column layer, or an embedding cut by features, whose outputs every rank then
has whole. ``row_split``: a row layer that is given its inputs whole. ``packed_column``: a column
layer whose outputs are two equal tensors one behind the other, or as many as ``packed_column/3``
says. ``key_value``: a column layer of the heads of keys or values; where there are fewer heads than
ranks, several ranks have the same one. ``replicated_summed``: on every rank alike, outside of a
region, but fed what is divided: gradients are summed, as they are in a region.

Parameters that are no linear layer's are cut too, where the pattern names the parameter: by
``column`` and ``packed_column`` in the last dim but one, by ``row`` and ``packed_row`` in the last.
What holds them is ``experts``, whose inputs enter and whose results are summed, or ``local``, which
lies between a column and a row layer. ``averaged``: in experts, what all ranks compute alike, of
which each gives its share to the sum.
"""
COLUMN_STYLES = ("column", "packed_column", "key_value")
"""Styles of linear layers whose outputs stay divided."""
_CUTS = ("column", "packed_column", "row", "packed_row")


def split_style(style: str) -> tuple[str, int]:
    """Return a style and how many pieces are packed: ``packed_column/3`` packs three."""
    name, _, pieces = style.partition("/")
    if not name.startswith("packed") or (pieces and not (pieces.isdigit() and int(pieces) > 1)):
        return style, 1
    return name, int(pieces or 2)


@dataclass(frozen=True)
class Styled:
    """A module that a plan names, or that lies in one.

    Attributes:
        name: Its full name.
        module: It.
        pattern: The first pattern that matches it; empty where none does.
        style: The style of that pattern; None where none does.
        in_region: Whether it is or lies in a region, where ranks' values differ.
        nested: Whether a module around it is or lies in a region.
        in_sequence: Whether it is or lies in what the plan calls a sequence.
        holder: The module that it is an attribute of; None of a whole model.
        pieces: Equal ones that are packed in its outputs.
        cuts: How its own parameters are cut, by their names in it.
    """

    name: str
    module: nn.Module
    pattern: str
    style: str | None
    in_region: bool
    nested: bool
    in_sequence: bool
    holder: nn.Module | None = None
    pieces: int = 1
    cuts: Mapping[str, Cut] = field(default_factory=dict)


def style_modules(module: nn.Module, plan: Mapping[str, str]) -> list[Styled]:
    """Return every module of a tree, parents first, with what a plan says of it."""
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
            holder=parent.module if parent is not None else None,
            pieces=pieces,
            cuts=_cuts(name, submodule, plan),
        )
    return list(by_name.values())


def _cuts(name: str, module: nn.Module, plan: Mapping[str, str]) -> dict[str, Cut]:
    """Return how the plan cuts parameters that are no linear layer's and no embedding's."""
    cuts: dict[str, Cut] = {}
    if _is_layer(module):
        return cuts
    for key, parameter in module._parameters.items():
        full = f"{name}.{key}".lstrip(".")
        pattern = next((p for p in plan if fnmatchcase(full, p)), None)
        style, pieces = split_style(plan[pattern]) if pattern is not None else ("", 1)
        if parameter is None or style not in _CUTS:
            continue
        if style.endswith("column"):
            cuts[key] = Cut(max(0, parameter.ndim - 2), pieces)
        elif parameter.ndim > 1:
            cuts[key] = Cut(parameter.ndim - 1, pieces)
    return cuts


def plan_issues(
    module: nn.Module, plan: Mapping[str, str], *, degree: int, sequence_parallel: bool
) -> list[tuple[str, str]]:
    """Return what keeps a plan from dividing a module among ``degree`` ranks.

    Args:
        module: The whole model, on any device.
        plan: Pattern of names to style.
        degree: Ranks on the tensor axis.
        sequence_parallel: Whether norms and the like are to see a part of the sequence.

    Returns:
        ``(pattern, message)``, at most one for each pattern; the pattern is empty where the fault
        is not of one.
    """
    modules = style_modules(module, plan)
    named = {entry.pattern for entry in modules}
    named |= {
        p for p in plan for entry in modules if entry.cuts and _matches(p, entry.name, entry.module)
    }
    issues = unknown_styles(plan)
    issues += [(p, _matches_nothing(p, modules)) for p in plan if p not in named]
    return issues + misfits(modules, degree=degree, sequence_parallel=sequence_parallel)


def unknown_styles(plan: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the problems of styles that do not exist, as ``plan_issues`` does."""
    return [
        (p, unknown("style", style, STYLES))
        for p, style in plan.items()
        if split_style(style)[0] not in STYLES
    ]


def misfits(
    modules: list[Styled], *, degree: int, sequence_parallel: bool
) -> list[tuple[str, str]]:
    """Return the problems of what a plan does match, as ``plan_issues`` does."""
    by_pattern: dict[str, str] = {}
    heads = _head_problems(modules, degree)
    for entry in modules:
        message = _unsuitable(entry, modules) or (None if heads else _indivisible(entry, degree))
        if message is not None:
            by_pattern.setdefault(entry.pattern, message)
    issues = [*by_pattern.items(), *(("", message) for message in heads)]
    issues += [("", message) for message in _tied_otherwise(modules)]
    if sequence_parallel:
        issues += [("", message) for message in _left_out(modules)]
    return issues


def _matches(pattern: str, name: str, module: nn.Module, *, style: str = "") -> bool:
    """Say whether a pattern with a style means a module, by its name or by that of a parameter.

    What cuts a parameter of something else than a layer means the parameter alone.
    """
    if fnmatchcase(name, pattern):
        return True
    if split_style(style)[0] in _CUTS and not _is_layer(module):
        return False
    return any(fnmatchcase(own_name, pattern) for own_name in _own_parameters(name, module))


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or linear_sizes(module) is not None


def _own_parameters(name: str, module: nn.Module) -> list[str]:
    return [f"{name}.{key}" if name else key for key in module._parameters]


def _matches_nothing(pattern: str, modules: list[Styled]) -> str:
    """Name what came before it, or was probably meant, numbers written as a pattern has them."""
    for entry in modules:
        if _matches(pattern, entry.name, entry.module):
            return (
                f"{entry.pattern} stands before it and matches {entry.name} too; put this one first"
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
        return f"{named}; {entry.style} is for nn.Linear with a forward and weight of its own"
    if entry.style == "vocabulary" and not (linear or embedding):
        return f"{named}; vocabulary is for nn.Linear and a plain nn.Embedding"
    if entry.style == "column_gathered" and not (linear or embedding):
        return f"{named}; column_gathered is for nn.Linear and a plain nn.Embedding"
    if entry.style in ("column_gathered", "row_split") and entry.nested:
        return f"{named}; it lies in a region, where ranks have parts of what it is given"
    if entry.style == "key_value" and key_value_heads(entry.holder, entry.module) is None:
        return f"{named}; key_value is for a layer of a module that has a head_dim"
    if entry.style == "region" and entry.nested:
        return f"{named}; it lies in a region already, and an input enters once"
    if entry.style == "region" and not any(
        other.style in (*COLUMN_STYLES, "vocabulary")
        and other.name.startswith(f"{entry.name}.".lstrip("."))
        for other in modules
    ):
        return f"{named}; a region holds layers of style column, and the plan gives it none"
    if entry.style == "experts":
        uncut = [
            k for k, p in entry.module._parameters.items() if p is not None and k not in entry.cuts
        ]
        if uncut or not entry.cuts:
            return f"{named}; the plan has to cut all its parameters, and {', '.join(uncut)} is not"
    if entry.cuts and entry.style not in ("experts", "local") and not entry.in_region:
        return (
            f"names {', '.join(entry.cuts)} of {entry.name}; give {entry.name} itself the style "
            "experts, if ranks' results are to be summed, or local"
        )
    return None


def _indivisible(entry: Styled, degree: int) -> str | None:
    for key, cut in entry.cuts.items():
        size = entry.module._parameters[key].shape[cut.dim]  # type: ignore[union-attr]
        if size % (degree * cut.pieces):
            use = divisor_of(size // cut.pieces)
            return f"{entry.name}.{key} has {size} there, which {degree} does not divide; use {use}"
    size, what = _divided_size(entry)
    if entry.style == "vocabulary":
        return empty_part(f"{entry.name}'s {what}", size, degree)
    heads = key_value_heads(entry.holder, entry.module) if entry.style == "key_value" else None
    if size % (degree * entry.pieces) == 0 or (heads and degree % heads == 0):
        return None
    use = divisor_of(size // entry.pieces)
    return f"{entry.name} has {size} {what}, which {degree} does not divide; use a degree of {use}"


def _divided_size(entry: Styled) -> tuple[int, str]:
    """Return the size that a style divides."""
    sizes = linear_sizes(entry.module)
    if isinstance(entry.module, nn.Embedding) and entry.style == "vocabulary":
        return entry.module.num_embeddings, "tokens"
    if isinstance(entry.module, nn.Embedding) and entry.style == "column_gathered":
        return entry.module.embedding_dim, "features"
    if sizes is not None:
        if entry.style in (*COLUMN_STYLES, "column_gathered", "vocabulary"):
            return sizes.outputs, "outputs"
        if entry.style in ("row", "row_split"):
            return sizes.inputs, "inputs"
    return 0, "sizes"


def holders(modules: Sequence[Styled]) -> list[tuple[nn.Module, dict[str, Styled]]]:
    """Return the modules that hold column-parallel layers, with those, by their names in it."""
    by_holder: dict[int, tuple[nn.Module, dict[str, Styled]]] = {}
    for entry in modules:
        if entry.style in COLUMN_STYLES and entry.holder is not None:
            of_holder = by_holder.setdefault(id(entry.holder), (entry.holder, {}))[1]
            of_holder[entry.name.rpartition(".")[2]] = entry
    return list(by_holder.values())


def shared_heads(columns: Mapping[str, Styled]) -> int | None:
    """Return the heads of keys and values that ranks may share; None where there are none."""
    for entry in columns.values():
        if entry.style == "key_value":
            return key_value_heads(entry.holder, entry.module)
    return None


def _head_problems(modules: list[Styled], degree: int) -> list[str]:
    divided = {entry.name for entry in modules if entry.style == "column"}
    problems: dict[str, None] = {}
    for entry in modules:
        if isinstance(entry.module, Attention) and f"{entry.name}.q_proj".lstrip(".") in divided:
            heads, fewer = entry.module.num_heads, entry.module.num_key_value_heads
            sizes = {"num_attention_heads": heads, "num_key_value_heads": fewer}
            for name, size in sizes.items():
                if size % degree and not (name == "num_key_value_heads" and fewer == heads):
                    use = divisor_of(size)
                    problems[f"{name}={size} is not divisible by it; use {use}"] = None
    for holder, columns in holders(modules):
        layers = {name: entry.module for name, entry in columns.items()}
        shared = shared_heads(columns)
        problems |= dict.fromkeys(indivisible_heads(holder, layers, degree, shared=shared))
    return list(problems)


def _tied_otherwise(modules: list[Styled]) -> Iterator[str]:
    """Report parameters that two modules share and only one of them cuts."""
    first: dict[nn.Parameter, tuple[str, str | None]] = {}
    for entry in modules:
        style = entry.style if _divided_size(entry)[0] else None
        for name, parameter in zip(
            _own_parameters(entry.name, entry.module),
            entry.module._parameters.values(),
            strict=True,
        ):
            if parameter is None:
                continue
            known, its_style = first.setdefault(parameter, (name, style))
            if its_style != style:
                yield (
                    f"{name} is {known}, and the plan divides them differently "
                    f"({style or 'replicated'} and {its_style or 'replicated'}); give both one "
                    "style"
                )


def _left_out(modules: list[Styled]) -> Iterator[str]:
    """Report what may see a part of the sequence without the plan's saying so."""
    for entry in modules:
        owns = any(p is not None and p.requires_grad for p in entry.module._parameters.values())
        if owns and entry.style is None and not (entry.in_region or entry.in_sequence):
            yield (
                f"sequence_parallel: the plan names no {entry.name or 'parameters of the model'}"
                ", and it matters whether it sees a part of the sequence: give it the style "
                "sequence, or replicated where it sees all"
            )
            return
