"""A batch without values through a model, whole and as one rank has it: do its modules agree?

A plan may leave a number of heads, a bias for each head or a reshape as the whole model has them.
The batch has one sample of a prime number of tokens, so that no reshape can take a part of the
heads for a part of the positions. What does not run whole is not judged; no rank is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.engines.tensor.local_parameters import Cut, TensorAxis
from axonlaunch.engines.tensor.parallelize import divide
from axonlaunch.engines.tensor.plan_checks import Styled, holders, style_modules
from axonlaunch.models.fake_tensor_cache import fake_tensor_mode, silence_fake_tensors
from axonlaunch.models.initialization import materialize
from axonlaunch.models.lora import ADAPTER_PARTS

_LENGTHS = (13, 17)
"""Tokens of the sample: the first that is no multiple of the degree."""

Shapes = dict[str, tuple[int, ...]]


def disagreement(
    model: nn.Module, plan: Mapping[str, str], *, degree: int, blocks: Iterable[str] = ()
) -> str | None:
    """Return the first module of a rank that disagrees with the whole model's; None if none does.

    One between a column and a row layer may see a part, but then what it learns has to be summed:
    each rank has the gradient of its features alone, and slopes of an activation would drift.

    Args:
        model: Whole, on ``meta``; it takes tokens, and is not changed.
        plan: Pattern of names to style; it has no problems of other kinds.
        degree: Ranks on the tensor axis.
        blocks: Names of its repeated blocks: of those that are alike the first is run.
    """
    length = next(length for length in _LENGTHS if length % degree)
    whole_model, part = copy.deepcopy(model), copy.deepcopy(model)
    repeats = _repeats(model, blocks)
    expected, failure = _run(whole_model, length, repeats)
    if failure is not None:
        return None
    divide(part, plan, _FirstRank(degree))
    seen, failure = _run(part, length, repeats)
    if failure is not None:
        return f"{failure} once it is divided among {degree} ranks, and not before"
    modules = style_modules(model, plan)
    around = [holder for holder, _ in holders(modules)]
    around += [entry.module for entry in modules if entry.style == "experts"]
    inside = {id(part) for holder in around for part in holder.modules()}
    inside -= {id(holder) for holder in around}
    logits = [
        expected[entry.name][-1:] for entry in modules if _is_head(entry) and entry.name in expected
    ]
    for entry in modules:
        whole, returned = expected.get(entry.name), seen.get(entry.name)
        wanted = None
        if whole is not None:
            free = id(entry.module) in inside or whole[-1:] in logits
            wanted = _wanted_shape(entry, whole, degree, free=free)
        if wanted is not None and returned != wanted:
            shown = "nothing" if returned is None else list(returned)
            return f"{entry.name} returns {shown} on a rank, not {list(wanted)}"
        if whole and wanted is None and returned != whole and _learns_from_a_part(entry):
            return (
                f"{entry.name} has parameters that the plan does not cut, and sees a part of the "
                "features; give it the style replicated_summed in strategy.tensor.plan"
            )
    return None


def _learns_from_a_part(entry: Styled) -> bool:
    """Say whether nothing sums the gradients of what each rank has whole; adapters are cut."""
    if isinstance(entry.module, ADAPTER_PARTS):
        return False
    learned = [key for key, p in entry.module._parameters.items() if p is not None]
    whole = [key for key in learned if key not in entry.cuts]
    return bool(whole) and entry.style in (None, "replicated") and not entry.in_region


class _FirstRank(TensorAxis):
    """The first of some ranks that are not there: parameters are its parts, as plain tensors."""

    def __init__(self, degree: int) -> None:
        group: Any = _Nobody(range(degree), None)
        super().__init__(None, group=group, overlaps=False)  # type: ignore[arg-type]

    def _place(self, parameter: nn.Parameter, cut: Cut | None) -> nn.Parameter:
        part = parameter.detach() if cut is None else self.part_of(parameter.detach(), cut)
        return nn.Parameter(part, requires_grad=parameter.requires_grad)


class _Nobody(ProcessGroup):
    """A group of one present rank: its collectives get tensors without values."""

    def __init__(self, ranks: range, torch_group: None) -> None:
        super().__init__(ranks, torch_group)
        self.rank = 0

    @property
    def torch_group(self) -> Any:
        return SimpleNamespace(group_name="nobody")


def _repeats(model: nn.Module, blocks: Iterable[str]) -> dict[str, str]:
    """Return ``{name: first like it}`` of blocks that are made alike, but for the first of each."""
    first: dict[Any, str] = {}
    repeats = {}
    for name in blocks:
        block = model.get_submodule(name)
        made = (
            repr(block),
            tuple((key, parameter.shape) for key, parameter in block.named_parameters()),
        )
        if first.setdefault(made, name) != name:
            repeats[name] = first[made]
    return repeats


def _run(model: nn.Module, length: int, repeats: Mapping[str, str]) -> tuple[Shapes, str | None]:
    """Return the shapes of what modules return, and where it failed and how, if it did."""
    shapes: Shapes = {}
    running: list[str] = []
    returned: dict[str, Any] = {}
    for name in set(repeats.values()):
        model.get_submodule(name).register_forward_hook(_keeping(name, returned))
    for name, like in repeats.items():
        model.get_submodule(name).forward = lambda *_, like=like, **__: returned[like]
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
        module.register_forward_hook(_noting(name, shapes, running))
    silence_fake_tensors()
    try:
        with torch.no_grad(), fake_tensor_mode():
            materialize(model, device="cpu")
            model(torch.zeros((1, length), dtype=torch.int64))
    except Exception as error:  # code of others may fail in any way
        reason = " ".join(str(error).split())[:200]
        where = running[-1] if running else "the model"
        return shapes, f"{where or 'the model'} fails with {type(error).__name__} ({reason})"
    return shapes, None


def _noting(name: str, shapes: Shapes, running: list[str]) -> Any:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        running.pop()
        first = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(first, Tensor):
            shapes[name] = tuple(first.shape)

    return note


def _keeping(name: str, returned: dict[str, Any]) -> Any:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        returned[name] = output

    return keep


def _wanted_shape(
    entry: Styled, whole: tuple[int, ...], degree: int, *, free: bool
) -> tuple[int, ...] | None:
    """Return the shape that a rank's module is to return; None where it may be either.

    Inside of a module that holds column layers ranks have some heads or features, and what comes
    after the head some logits.
    """
    if entry.style in ("row", "row_split", "column_gathered", "experts", "region"):
        return whole
    if entry.style in ("column", "packed_column") or _is_head(entry):
        return (*whole[:-1], -(-whole[-1] // degree))
    return None if free or not entry.name else whole


def _is_head(entry: Styled) -> bool:
    return entry.style == "vocabulary" and not isinstance(entry.module, nn.Embedding)
