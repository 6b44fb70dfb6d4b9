"""Checks a plan by comparing output shapes of the full model and of one rank's part.

A plan can miss a number of heads, a bias for each head, or a reshape that depends on full sizes.
The test batch has no values. It has one sample of a prime number of tokens, so a reshape cannot
confuse a part of the heads with a part of the positions. Models that fail unsharded are not
checked. No other ranks are needed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.engines.tensor.parallel_layers.local_parameters import ShardSpec, TensorAxis
from axonlaunch.engines.tensor.parallelize import shard_module
from axonlaunch.engines.tensor.plan_checks import Styled, holders, style_modules
from axonlaunch.models.adapters.lora import ADAPTER_PARTS
from axonlaunch.models.fake.fake_tensor_cache import fake_tensor_mode, silence_fake_tensors
from axonlaunch.models.tensors.initialization import materialize

_LENGTHS = (13, 17)
"""Candidate lengths of the sample; the first that the degree does not divide is used."""

_COMPUTED_IN_FULL = (None, "replicated", "sequence", "full_sequence")
"""Styles of modules that compute on all features."""

Shapes = dict[str, tuple[int, ...]]


def division_problem(
    model: nn.Module, plan: Mapping[str, str], *, degree: int, blocks: Iterable[str] = ()
) -> str | None:
    """Return an error message for the first module with wrong output shape; None if all agree.

    A module between a column and a row layer may return a shard. If it has parameters that are not
    sharded, their gradients must be summed: each rank sees only the gradient of its own features,
    and the copies (slopes of an activation, for example) would drift apart.

    Args:
        model: The full model, on ``meta``; takes tokens and is not changed.
        plan: Maps name patterns to styles; must have passed ``plan_issues``.
        degree: Number of ranks on the tensor axis.
        blocks: Names of the repeated blocks; of several identical ones only the first is run.
    """
    length = next(length for length in _LENGTHS if length % degree)
    whole_model, rank_model = copy.deepcopy(model), copy.deepcopy(model)
    repeats = _repeats(model, blocks)
    expected, failure = _run(whole_model, length, repeats)
    if failure is not None:
        return None
    shard_module(rank_model, plan, _FirstRank(degree))
    actual, failure = _run(rank_model, length, repeats)
    if failure is not None:
        return f"{failure} after it is sharded over {degree} ranks, but not before"
    modules = style_modules(model, plan)
    containers = [holder for holder, _ in holders(modules)]
    containers += [entry.module for entry in modules if entry.style == "experts"]
    inner_modules = {id(child) for holder in containers for child in holder.modules()}
    inner_modules -= {id(holder) for holder in containers}
    logits = [
        expected[entry.name][-1:] for entry in modules if _is_head(entry) and entry.name in expected
    ]
    for entry in modules:
        full_shape, rank_shape = expected.get(entry.name), actual.get(entry.name)
        expected_shape = None
        if full_shape is not None:
            may_be_sharded = id(entry.module) in inner_modules or full_shape[-1:] in logits
            expected_shape = _expected_shape(
                entry, full_shape, degree, may_be_sharded=may_be_sharded
            )
        if expected_shape is not None and rank_shape != expected_shape:
            shown = "nothing" if rank_shape is None else list(rank_shape)
            return f"{entry.name} returns {shown} on a rank, not {list(expected_shape)}"
        if (
            full_shape
            and expected_shape is None
            and rank_shape != full_shape
            and _needs_summed_gradients(entry)
        ):
            return (
                f"{entry.name} has parameters that the plan does not shard, but sees only part of "
                "the features; give it the style replicated_summed in strategy.tensor.plan"
            )
    return None


def _needs_summed_gradients(entry: Styled) -> bool:
    """Return whether the module has replicated parameters and nothing sums their gradients."""
    if isinstance(entry.module, ADAPTER_PARTS):
        return False
    keys = [key for key, p in entry.module._parameters.items() if p is not None]
    unsharded = [key for key in keys if key not in entry.shard_specs]
    return bool(unsharded) and entry.style in _COMPUTED_IN_FULL and not entry.in_region


class _FirstRank(TensorAxis):
    """The first rank of an axis without other ranks: parameters are plain tensors, its shards."""

    def __init__(self, degree: int) -> None:
        group: Any = _AbsentGroup(range(degree), None)
        super().__init__(None, group=group, overlaps=False)  # type: ignore[arg-type]

    def _local_parameter(self, parameter: nn.Parameter, shard: ShardSpec | None) -> nn.Parameter:
        part = parameter.detach() if shard is None else self.part_of(parameter.detach(), shard)
        return nn.Parameter(part, requires_grad=parameter.requires_grad)


class _AbsentGroup(ProcessGroup):
    """A group with one present rank, whose collectives only see tensors without values."""

    def __init__(self, ranks: range, torch_group: None) -> None:
        super().__init__(ranks, torch_group)
        self.rank = 0

    @property
    def torch_group(self) -> Any:
        return SimpleNamespace(group_name="absent")


def _repeats(model: nn.Module, blocks: Iterable[str]) -> dict[str, str]:
    """Map each repeated block, except the first of its kind, to the first identical block."""
    first: dict[Any, str] = {}
    repeats = {}
    for name in blocks:
        block = model.get_submodule(name)
        signature = (
            repr(block),
            tuple((key, parameter.shape) for key, parameter in block.named_parameters()),
        )
        if first.setdefault(signature, name) != name:
            repeats[name] = first[signature]
    return repeats


def _run(model: nn.Module, length: int, repeats: Mapping[str, str]) -> tuple[Shapes, str | None]:
    """Return the output shapes of all modules, and a failure message or None."""
    shapes: Shapes = {}
    running: list[str] = []
    returned: dict[str, Any] = {}
    for name in set(repeats.values()):
        model.get_submodule(name).register_forward_hook(_record_output(name, returned))
    for name, first in repeats.items():
        model.get_submodule(name).forward = lambda *_, first=first, **__: returned[first]
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
        module.register_forward_hook(_record_shape(name, shapes, running))
    silence_fake_tensors()
    try:
        with torch.no_grad(), fake_tensor_mode():
            materialize(model, device="cpu")
            model(torch.zeros((1, length), dtype=torch.int64))
    except Exception as error:  # user code may raise any exception
        reason = " ".join(str(error).split())[:200]
        failed_module = running[-1] if running else "the model"
        return (
            shapes,
            f"{failed_module or 'the model'} fails with {type(error).__name__} ({reason})",
        )
    return shapes, None


def _record_shape(name: str, shapes: Shapes, running: list[str]) -> Any:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        running.pop()
        first = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(first, Tensor):
            shapes[name] = tuple(first.shape)

    return note


def _record_output(name: str, returned: dict[str, Any]) -> Any:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        returned[name] = output

    return keep


def _expected_shape(
    entry: Styled, full_shape: tuple[int, ...], degree: int, *, may_be_sharded: bool
) -> tuple[int, ...] | None:
    """Return the output shape that a rank's module must have; None if several are valid.

    Inside a module that holds column layers, outputs may have only this rank's heads or features;
    after the head, they may have only this rank's logits. Adapters are checked by their layer.
    """
    if isinstance(entry.module, ADAPTER_PARTS):
        return None
    if entry.style in ("row", "row_split", "column_gathered", "experts", "region"):
        return full_shape
    if entry.style in ("column", "packed_column") or _is_head(entry):
        return (*full_shape[:-1], -(-full_shape[-1] // degree))
    return None if may_be_sharded or not entry.name else full_shape


def _is_head(entry: Styled) -> bool:
    return entry.style == "vocabulary" and not isinstance(entry.module, nn.Embedding)
