"""Splits a model into pipeline stages: chooses each stage's blocks and removes the others.

Models that do not declare which modules belong to the first and last stage are refused, and so are
splits with more stages than blocks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.engines.pipeline import placeholders
from axonlaunch.models.build import spec_for
from axonlaunch.models.fake.fake_tensor_cache import fake_tensor_mode, silence_fake_tensors
from axonlaunch.models.specs.model_spec import BlockFlow, ModelSpec
from axonlaunch.models.tensors.initialization import materialize


def _flops_of_experts(a: torch.Size, b: torch.Size, *_: object, **__: object) -> int:
    """Return the FLOPs of [S, K] x [experts, K, N], or of [K, S] x [S, N]."""
    return 2 * a[0] * a[1] * b[-1]


def _flops_of_attention(
    query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object
) -> int:
    # The formula expects equal head counts. Shared key-value heads need the same FLOPs.
    shapes = [torch.Size((*query[:2], *shape[2:])) for shape in (query, key, value)]
    return int(sdpa_flop_count(*shapes))


_UNCOUNTED: dict[Any, Any] = {
    torch.ops.aten._grouped_mm: _flops_of_experts,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flops_of_attention,
}
"""FLOPs of operations that torch's counter leaves out. Models are measured as if on a CPU."""
_balanced: dict[Hashable, list[int]] = {}
"""Cache of block counts per stage, by everything they depend on; used by ranks that are threads."""


@dataclass(frozen=True)
class Part:
    """The part of a model in one stage.

    Attributes:
        index: Stage number, from 0.
        num_stages: Number of stages of the pipeline.
        first: Index of the stage's first block.
        last: Index after the stage's last block.
    """

    index: int
    num_stages: int
    first: int
    last: int

    @property
    def is_first(self) -> bool:
        """Whether the stage receives the samples."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage returns the model's outputs."""
        return self.index == self.num_stages - 1


def parts(counts: Sequence[int]) -> list[Part]:
    """Return the stages for the given number of blocks per stage."""
    stops = list(itertools.accumulate(counts))
    starts = [0, *stops[:-1]]
    return [
        Part(index, len(counts), first, last)
        for index, (first, last) in enumerate(zip(starts, stops, strict=True))
    ]


def ends_of(spec: ModelSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the modules that only the first, and only the last, stage keeps."""
    if spec.flow is not None:
        flow = spec.flow()
        return flow.before_blocks, flow.after_blocks
    return spec.ends or ((), ())


def around_blocks(spec: ModelSpec, model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules that a model or stage calls before its blocks, and after them."""
    children = dict(model.named_children())
    before_blocks, after_blocks = (
        [children[n] for n in names if n in children] for names in ends_of(spec)
    )
    return before_blocks, after_blocks


def holds(ends: Sequence[str], parameter: str) -> bool:
    """Return whether a parameter is, or belongs to, one of the named modules."""
    return any(f"{parameter}.".startswith(f"{name}.") for name in ends)


def crossing_ties(spec: ModelSpec, ties: Mapping[str, str]) -> dict[str, str]:
    """Return the ties ``{other name: first name}`` between parameters on different stages."""
    at_start, _ = ends_of(spec)
    return {
        other: first
        for other, first in ties.items()
        if holds(at_start, other) != holds(at_start, first)
    }


def cuttable(spec: ModelSpec, model: nn.Module) -> bool:
    """Return whether a model can be split: it declares blocks and ends or is ``nn.Sequential``."""
    named = spec.layers is not None and (spec.ends is not None or spec.flow is not None)
    return named or type(model) is nn.Sequential


def block_names(spec: ModelSpec, model: nn.Module) -> list[str]:
    """Return the full names of the modules that are distributed among stages, in order."""
    if spec.layers is None and type(model) is nn.Sequential:
        return [name for name, _ in model.named_children()]
    return list(spec.blocks(model))


def missing_ends(spec: ModelSpec, model: nn.Module) -> list[str]:
    """Return the declared names of end modules that are not attributes of the model."""
    return [name for end in spec.ends or () for name in end if not hasattr(model, name)]


def kept_everywhere(spec: ModelSpec, model: nn.Module) -> list[str]:
    """Return trained parameters outside of blocks and ends.

    Every stage would keep a copy of them, and the copies would diverge.
    """
    assigned_modules = {*block_names(spec, model), *itertools.chain(*ends_of(spec))}
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and assigned_modules.isdisjoint(itertools.accumulate(name.split("."), "{}.{}".format))
    ]


def stage_module(
    spec: ModelSpec, model: nn.Module, part: Part, *, sequence_parts: int = 1
) -> nn.Module:
    """Remove the modules that a stage does not keep from a full model, in place, and return it.

    The remaining modules keep their names, so a stage's state is a subset of the model's.

    Args:
        spec: Spec of the model.
        model: The full model.
        part: Blocks and ends of the stage.
        sequence_parts: Number of parts that hidden states divide the sequence into.
    """
    names = block_names(spec, model)
    if spec.flow is not None:
        return placeholders.keep_blocks(
            model,
            spec.flow(),
            blocks=names,
            first=part.first,
            last=part.last,
            sequence_parts=sequence_parts,
        )
    for index, name in enumerate(names):
        if not part.first <= index < part.last:
            parent, _, child = name.rpartition(".")
            parent_module = model.get_submodule(parent)
            if type(parent_module) is nn.Sequential:
                del parent_module._modules[child]
            else:
                parent_module._modules[child] = None
    for ends, is_kept in zip(spec.ends or ((), ()), (part.is_first, part.is_last), strict=True):
        for name in () if is_kept else ends:
            setattr(model, name, None)
    return model


def balance(costs: Sequence[float], *, num_stages: int, first: float, last: float) -> list[int]:
    """Distribute blocks among stages so that the cost of the most expensive stage is minimal.

    Args:
        costs: Cost of each block, in order.
        num_stages: Number of stages; each gets at least one block.
        first: Cost of the modules that only the first stage holds.
        last: Cost of the modules that only the last stage holds.

    Returns:
        Number of blocks per stage. Ties are broken by the smallest sum of squared stage costs.
    """
    cumulative = [0.0, *itertools.accumulate(costs)]

    def cost(index: int, start: int, stop: int) -> float:
        ends = (first if index == 0 else 0.0) + (last if index == num_stages - 1 else 0.0)
        return cumulative[stop] - cumulative[start] + ends

    # best[stop]: (highest stage cost, sum of squares, counts) of the best split of blocks[:stop]
    # into the stages so far.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for index in range(num_stages):
        candidates: dict[int, tuple[float, float, list[int]]] = {}
        for start, (highest, squares, counts) in best.items():
            for stop in range(start + 1, len(costs) - (num_stages - 1 - index) + 1):
                stage_cost = cost(index, start, stop)
                option = (
                    max(highest, stage_cost),
                    squares + stage_cost**2,
                    [*counts, stop - start],
                )
                if stop not in candidates or option < candidates[stop]:
                    candidates[stop] = option
        best = candidates
    return best[len(costs)][2]


def stage_blocks(
    config: RunConfig, layout: Layout, full: nn.Module, *, sample: Tensor
) -> list[int]:
    """Return the number of blocks per pipeline stage, as configured or balanced.

    Args:
        config: Configuration of the run.
        layout: Layout of the run.
        full: The full model.
        sample: Inputs of one sample [...]; only shape and type matter.
    """
    split = config.strategy.pipeline.split
    if split != "auto":
        return split
    shape = (1, *sample.shape)
    key = (layout.num_stages, shape, sample.dtype, _size_key(config, full))
    if key not in _balanced:
        device = next(full.parameters()).device
        _balanced[key] = stage_counts(
            spec_for(config),
            full,
            num_stages=layout.num_stages,
            sample=torch.zeros(shape, dtype=sample.dtype, device=device),
        )
    return [*_balanced[key]]


def _size_key(config: RunConfig, model: nn.Module) -> Hashable:
    """Return a key that is equal for models whose blocks compute the same."""
    parameters = tuple(p.shape for p in model.parameters())
    modules = tuple((name, type(module)) for name, module in model.named_modules())
    return repr(config.model), parameters, modules


def stage_counts(
    spec: ModelSpec, model: nn.Module, *, num_stages: int, sample: Tensor
) -> list[int]:
    """Balance a model's blocks among stages by the time of their matrix products and attention.

    A model of 32 blocks whose head takes as long as 2.4 blocks gets ``[4, 4, 4, 4, 4, 5, 5, 2]`` in
    8 stages, because all stages wait for the slowest one. FLOPs of the forward stand for the time
    of a training step. A model without products is balanced by parameters.

    Args:
        spec: Specification of the model.
        model: The full model, on the meta device or with values.
        num_stages: Number of stages.
        sample: Inputs of one sample [1, ...], on the model's device; only shape and type matter.
    """
    names = block_names(spec, model)
    first, *costs, last = _flops_by_block(spec, model, names, sample)
    if not any(costs):
        first = last = 0
        costs = [sum(p.numel() for p in model.get_submodule(n).parameters()) for n in names]
    return balance(costs, num_stages=num_stages, first=first, last=last)


def _flops_by_block(
    spec: ModelSpec, model: nn.Module, names: Sequence[str], sample: Tensor
) -> list[int]:
    """Return the FLOPs of a forward before the blocks, in each block, and after them."""
    if spec.flow is None:
        return _flops_by_sample(spec, None, model, names, sample)
    flow = spec.flow()  # outside of fake mode, because the copies it makes need real values
    # Model code may mix buffers that have values with parameters that have none.
    silence_fake_tensors()
    model = copy.deepcopy(model)
    with fake_tensor_mode():
        materialize(model, device="cpu")
        tokens = torch.zeros(sample.shape, dtype=sample.dtype)
        return _flops_by_sample(spec, flow, model, names, tokens)


def _flops_by_sample(
    spec: ModelSpec, flow: BlockFlow | None, model: nn.Module, names: Sequence[str], sample: Tensor
) -> list[int]:
    """Measure only three blocks if all blocks are alike; otherwise all."""
    if len(names) <= 3 or not spec.repeats(model):
        return _flops(model, names, sample)
    skipped, measured = names[2:-1], [*names[:2], names[-1]]
    skipping = (
        _without(model, skipped)
        if flow is None
        else placeholders.without(model, flow, blocks=skipped)
    )
    with skipping:
        start, block, inner, end, rest = _flops(model, measured, sample)
    return [start, block, *[inner] * (len(names) - 2), end, rest]


@contextmanager
def _without(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Temporarily remove blocks from a model, as stages do."""
    removed = []
    for name in names:
        parent, _, child = name.rpartition(".")
        parent_module = model.get_submodule(parent)
        removed.append((parent_module, child, parent_module._modules[child]))
        parent_module._modules[child] = None
    try:
        yield
    finally:
        for parent_module, child, block in removed:
            parent_module._modules[child] = block


def _flops(model: nn.Module, names: Sequence[str], sample: Tensor) -> list[int]:
    """Return the FLOPs of a forward before the named blocks, in each of them, and after them."""
    flops = [0] * (len(names) + 2)
    position, counted = 0, 0
    counter = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED)

    def move_to(index: int) -> None:
        nonlocal position, counted
        total = counter.get_total_flops()
        flops[position] += total - counted
        position, counted = index, total

    with ExitStack() as stack:
        for index, name in enumerate(names, start=1):
            block = model.get_submodule(name)
            pre_hook = block.register_forward_pre_hook(lambda *_, i=index: move_to(i))
            post_hook = block.register_forward_hook(
                lambda *_, i=index: move_to(-1 if i == len(names) else i)
            )
            stack.callback(pre_hook.remove)
            stack.callback(post_hook.remove)
        training = model.training
        model.eval()  # do not change running statistics or use random numbers
        with counter:
            model(sample)
        move_to(-1)
        model.train(training)
    return flops
