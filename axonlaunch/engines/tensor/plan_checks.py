"""What a tensor plan says of a module, and everything that is wrong with a plan.

It reads modules, on ``meta`` too, and changes none; no rank needs to be there.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from axonlaunch.config.errors import divisor_of
from axonlaunch.models.attention import Attention
from axonlaunch.registry import unknown

STYLES = ("column", "row", "vocabulary", "sequence", "region", "replicated")
"""The styles of a plan.

``column``: an ``nn.Linear`` whose outputs are divided and stay so. ``row``: one whose inputs are
divided; the results are summed. ``vocabulary``: an ``nn.Embedding`` or the head, an ``nn.Linear``
whose logits stay divided. ``sequence``: under sequence parallelism it sees a part of the
sequence; an ``nn.Embedding`` (of positions) gives its part. ``region``: its column layers all
read its one input. ``replicated``: every rank computes all of it, as it does of what no pattern
names.
"""


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
    """

    name: str
    module: nn.Module
    pattern: str
    style: str | None
    in_region: bool
    nested: bool
    in_sequence: bool


def styled(module: nn.Module, plan: Mapping[str, str]) -> list[Styled]:
    """Return every module of a tree, parents first, with what a plan says of it."""
    found: dict[str, Styled] = {}
    for name, submodule in module.named_modules():
        pattern = next((p for p in plan if _matches(p, name, submodule)), "")
        style = plan.get(pattern)
        parent = found.get(name.rpartition(".")[0]) if name else None
        nested = parent is not None and parent.in_region
        found[name] = Styled(
            name,
            submodule,
            pattern,
            style,
            in_region=style == "region" or nested,
            nested=nested,
            in_sequence=style == "sequence"
            or (style is None and parent is not None and parent.in_sequence),
        )
    return list(found.values())


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
    modules = styled(module, plan)
    named = {one.pattern for one in modules}
    found = unknown_styles(plan)
    found += [(p, _matches_nothing(p, modules)) for p in plan if p not in named]
    return found + misfits(modules, degree=degree, sequence_parallel=sequence_parallel)


def unknown_styles(plan: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the problems of styles that do not exist, as ``problems`` does."""
    return [
        (p, unknown("style", style, STYLES)) for p, style in plan.items() if style not in STYLES
    ]


def misfits(
    modules: list[Styled], *, degree: int, sequence_parallel: bool
) -> list[tuple[str, str]]:
    """Return the problems of what a plan does match, as ``problems`` does."""
    by_pattern: dict[str, str] = {}
    heads = _head_problems(modules, degree)
    for one in modules:
        message = _unsuitable(one, modules) or (None if heads else _indivisible(one, degree))
        if message is not None:
            by_pattern.setdefault(one.pattern, message)
    found = [*by_pattern.items(), *(("", message) for message in heads)]
    found += [("", message) for message in _tied_otherwise(modules)]
    if sequence_parallel:
        found += [("", message) for message in _left_out(modules)]
    return found


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    return any(fnmatchcase(one, pattern) for one in (name, *_own_parameters(name, module)))


def _own_parameters(name: str, module: nn.Module) -> list[str]:
    return [f"{name}.{key}" if name else key for key in module._parameters]


def _matches_nothing(pattern: str, modules: list[Styled]) -> str:
    """Name what came before it, or was probably meant, numbers written as a pattern has them."""
    for one in modules:
        if _matches(pattern, one.name, one.module):
            return f"{one.pattern} stands before it and matches {one.name} too; put this one first"
    names = {re.sub(r"\b\d+\b", "*", one.name) for one in modules if one.name}
    close = difflib.get_close_matches(pattern, sorted(names), n=3, cutoff=0.6)
    if not close:
        close = sorted(name for name in names if "." not in name)
    return f"matches no module and no parameter; the model has {', '.join(close) or 'no parts'}"


def _unsuitable(one: Styled, modules: list[Styled]) -> str | None:
    kind = type(one.module)
    named = f"names {one.name or 'the model itself'}, of type {kind.__name__}"
    linear = (
        isinstance(one.module, nn.Linear)
        and kind.forward is nn.Linear.forward
        and "weight" in one.module._parameters
    )
    embedding = (
        isinstance(one.module, nn.Embedding)
        and kind.forward is nn.Embedding.forward
        and not (one.module.max_norm or one.module.scale_grad_by_freq or one.module.sparse)
    )
    if one.style in ("column", "row") and not linear:
        return f"{named}; {one.style} is for nn.Linear with a forward and weight of its own"
    if one.style == "vocabulary" and not (linear or embedding):
        return f"{named}; vocabulary is for nn.Linear and a plain nn.Embedding"
    if one.style == "region" and one.nested:
        return f"{named}; it lies in a region already, and an input enters once"
    if one.style == "region" and not any(
        other.style in ("column", "vocabulary")
        and other.name.startswith(f"{one.name}.".lstrip("."))
        for other in modules
    ):
        return f"{named}; a region holds layers of style column, and the plan gives it none"
    return None


def _indivisible(one: Styled, degree: int) -> str | None:
    size, what = _divided(one)
    if size % degree == 0:
        return None
    message = (
        f"{one.name} has {size} {what}, which {degree} does not divide; use a degree of "
        f"{divisor_of(size)}"
    )
    if one.style == "vocabulary":
        message += f", or pad it to {-(-size // degree) * degree}"
    return message


def _divided(one: Styled) -> tuple[int, str]:
    """Return how many of what a style divides."""
    if isinstance(one.module, nn.Embedding) and one.style == "vocabulary":
        return one.module.num_embeddings, "tokens"
    if isinstance(one.module, nn.Linear):
        if one.style in ("column", "vocabulary"):
            return one.module.out_features, "outputs"
        if one.style == "row":
            return one.module.in_features, "inputs"
    return 0, "sizes"


def _head_problems(modules: list[Styled], degree: int) -> list[str]:
    divided = {one.name for one in modules if one.style == "column"}
    found: dict[str, None] = {}
    for one in modules:
        if isinstance(one.module, Attention) and f"{one.name}.q_proj".lstrip(".") in divided:
            heads, fewer = one.module.num_heads, one.module.num_key_value_heads
            sizes = {"num_attention_heads": heads, "num_key_value_heads": fewer}
            for name, size in sizes.items():
                if size % degree and not (name == "num_key_value_heads" and fewer == heads):
                    use = divisor_of(size)
                    found[f"{name}={size} is not divisible by it; use {use}"] = None
    return list(found)


def _tied_otherwise(modules: list[Styled]) -> Iterator[str]:
    """Tell parameters that two modules share and only one of them cuts."""
    first: dict[nn.Parameter, tuple[str, str | None]] = {}
    for one in modules:
        style = one.style if _divided(one)[0] else None
        for name, parameter in zip(
            _own_parameters(one.name, one.module), one.module._parameters.values(), strict=True
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
    """Tell what may see a part of the sequence without the plan's saying so."""
    for one in modules:
        owns = any(p is not None and p.requires_grad for p in one.module._parameters.values())
        if owns and one.style is None and not (one.in_region or one.in_sequence):
            yield (
                f"sequence_parallel: the plan names no {one.name or 'parameters of the model'}"
                ", and it matters whether it sees a part of the sequence: give it the style "
                "sequence, or replicated where it sees all"
            )
            return
