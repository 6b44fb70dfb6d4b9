"""Cuts a model into pipeline stages: which blocks a stage keeps, and how it is cut out.

It refuses a model that doesn't say what belongs to its two ends, and more stages than blocks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout
from axonlaunch.engines.pipeline import stand_ins
from axonlaunch.models.build import spec_for
from axonlaunch.models.fake_tensor_cache import fake_tensor_mode, silence_fake_tensors
from axonlaunch.models.initialization import materialize
from axonlaunch.models.spec import BlockFlow, ModelSpec
from axonlaunch.models.torch_internals import storage_key

# fp32 parameter, gradient and AdamW's two moments.
_BYTES_A_PARAMETER = 16
_balanced: dict[Hashable, list[int]] = {}
"""The blocks of each stage, by all that they depend on: ranks may be threads of one process."""


@dataclass(frozen=True)
class Part:
    """What one stage keeps of a model.

    Attributes:
        index: The stage, from 0.
        num_stages: Stages of the pipeline.
        first: Its first block.
        last: One past its last block.
    """

    index: int
    num_stages: int
    first: int
    last: int

    @property
    def is_first(self) -> bool:
        """Whether the stage is fed the samples."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage gives the outputs."""
        return self.index == self.num_stages - 1


def parts(counts: Sequence[int]) -> list[Part]:
    """Return the stages that hold so many blocks each."""
    stops = list(itertools.accumulate(counts))
    starts = [0, *stops[:-1]]
    return [
        Part(index, len(counts), first, last)
        for index, (first, last) in enumerate(zip(starts, stops, strict=True))
    ]


def ends_of(spec: ModelSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of what only the first, and only the last, stage keeps beside blocks."""
    if spec.flow is not None:
        flow = spec.flow()
        return flow.before, flow.after
    return spec.ends or ((), ())


def around_blocks(spec: ModelSpec, model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return what a model, or a stage of it, calls before its blocks and after them."""
    children = dict(model.named_children())
    before, after = ([children[n] for n in names if n in children] for names in ends_of(spec))
    return before, after


def holds(ends: Sequence[str], parameter: str) -> bool:
    """Say whether a parameter belongs to one of these modules, or is one of them."""
    return any(f"{parameter}.".startswith(f"{name}.") for name in ends)


def crossing_ties(spec: ModelSpec, ties: Mapping[str, str]) -> dict[str, str]:
    """Return those of ``{other name: first name}`` whose two ends lie on different stages."""
    at_start, _ = ends_of(spec)
    return {
        other: first
        for other, first in ties.items()
        if holds(at_start, other) != holds(at_start, first)
    }


def cuttable(spec: ModelSpec, model: nn.Module) -> bool:
    """Say whether a model can be cut: it names blocks and ends, or is a plain sequence."""
    named = spec.layers is not None and (spec.ends is not None or spec.flow is not None)
    return named or type(model) is nn.Sequential


def block_names(spec: ModelSpec, model: nn.Module) -> list[str]:
    """Return the full names of what stages are made of, in order."""
    if spec.layers is None and type(model) is nn.Sequential:
        return [name for name, _ in model.named_children()]
    return list(spec.blocks(model))


def missing_ends(spec: ModelSpec, model: nn.Module) -> list[str]:
    """Return names among a model's ends that it has no attribute of."""
    return [name for end in spec.ends or () for name in end if not hasattr(model, name)]


def kept_everywhere(spec: ModelSpec, model: nn.Module) -> list[str]:
    """Return trained parameters outside of blocks and ends: every stage would move its own."""
    homes = {*block_names(spec, model), *itertools.chain(*ends_of(spec))}
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and homes.isdisjoint(itertools.accumulate(name.split("."), "{}.{}".format))
    ]


def cut(spec: ModelSpec, model: nn.Module, part: Part) -> nn.Module:
    """Take out of a whole model, in place, what the stage does not keep; return it.

    What is kept keeps its name, so a stage's state is a part of the model's.
    """
    names = block_names(spec, model)
    if spec.flow is not None:
        return stand_ins.cut_out(model, spec.flow(), blocks=names, first=part.first, last=part.last)
    for index, name in enumerate(names):
        if not part.first <= index < part.last:
            parent, _, child = name.rpartition(".")
            owner = model.get_submodule(parent)
            if type(owner) is nn.Sequential:
                del owner._modules[child]
            else:
                owner._modules[child] = None
    for ends, is_kept in zip(spec.ends or ((), ()), (part.is_first, part.is_last), strict=True):
        for name in () if is_kept else ends:
            setattr(model, name, None)
    return model


def balance(costs: Sequence[float], *, num_stages: int, first: float, last: float) -> list[int]:
    """Divide blocks among stages so that the costliest stage costs least.

    Args:
        costs: Of each block, in order.
        num_stages: Stages; each gets one block or more.
        first: Cost of what only the first stage holds.
        last: Cost of what only the last stage holds.

    Returns:
        Blocks of each stage. Among equals, the one whose stages cost most alike.
    """
    before = [0.0, *itertools.accumulate(costs)]

    def cost(index: int, start: int, stop: int) -> float:
        ends = (first if index == 0 else 0.0) + (last if index == num_stages - 1 else 0.0)
        return before[stop] - before[start] + ends

    # best[stop]: (costliest stage, sum of squares, counts) of the stages so far over blocks[:stop].
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for index in range(num_stages):
        candidates: dict[int, tuple[float, float, list[int]]] = {}
        for start, (most, squares, counts) in best.items():
            for stop in range(start + 1, len(costs) - (num_stages - 1 - index) + 1):
                mine = cost(index, start, stop)
                option = (max(most, mine), squares + mine**2, [*counts, stop - start])
                if stop not in candidates or option < candidates[stop]:
                    candidates[stop] = option
        best = candidates
    return best[len(costs)][2]


def stage_blocks(
    config: RunConfig, layout: Layout, whole: nn.Module, *, sample: Tensor
) -> list[int]:
    """Return the blocks of each pipeline stage: as given, or balanced.

    Args:
        config: The run's.
        layout: Its layout.
        whole: The model, undivided.
        sample: One sample's inputs [...]; values don't matter.
    """
    split = config.strategy.pipeline.split
    if split != "auto":
        return split
    shape = (layout.micro_batch_size, *sample.shape)
    key = (layout.num_stages, layout.pipeline, shape, sample.dtype, _kind_of(config, whole))
    if key not in _balanced:
        device = next(whole.parameters()).device
        _balanced[key] = stage_counts(
            spec_for(config),
            whole,
            num_stages=layout.num_stages,
            sample=torch.zeros(shape, dtype=sample.dtype, device=device),
            in_flight=layout.pipeline,
        )
    return [*_balanced[key]]


def _kind_of(config: RunConfig, model: nn.Module) -> Hashable:
    """Return what two models have in common whose stages hold the same bytes."""
    parameters = tuple((p.shape, p.dtype, p.requires_grad) for p in model.parameters())
    modules = tuple((name, type(module)) for name, module in model.named_modules())
    return repr(config.model), parameters, modules


def stage_counts(
    spec: ModelSpec, model: nn.Module, *, num_stages: int, sample: Tensor, in_flight: int
) -> list[int]:
    """Balance a model's blocks over stages by the bytes that training them holds.

    Args:
        spec: The model's.
        model: Whole, on the meta device or with values.
        num_stages: Stages.
        sample: One micro-batch of inputs, on the model's device; values don't matter.
        in_flight: Micro-batches whose activations a stage holds at once.
    """
    names = block_names(spec, model)
    saved = _saved_by_each(spec, model, names, sample)

    def bytes_of(parameters: Iterator[nn.Parameter], activations: int) -> float:
        count = sum(p.numel() for p in parameters)
        return _BYTES_A_PARAMETER * count + activations * in_flight

    costs = [
        bytes_of(model.get_submodule(name).parameters(), saved[index + 1])
        for index, name in enumerate(names)
    ]
    named = dict(model.named_parameters(remove_duplicate=False))
    first, last = (
        bytes_of((p for name, p in named.items() if holds(end, name)), saved[place])
        for end, place in zip(ends_of(spec), (0, -1), strict=True)
    )
    return balance(costs, num_stages=num_stages, first=first, last=last)


def _saved_by_each(
    spec: ModelSpec, model: nn.Module, names: Sequence[str], sample: Tensor
) -> list[int]:
    """Return bytes that backward keeps: before the blocks, of each block, after them."""
    if spec.flow is None:
        return _saved_by_few(spec, None, model, names, sample)
    flow = spec.flow()  # out here: what it copies of a model that nobody has run yet has values
    # Code of others mixes buffers that have values with parameters that have none.
    silence_fake_tensors()
    model = copy.deepcopy(model)
    with fake_tensor_mode():
        materialize(model, device="cpu")
        tokens = torch.zeros(sample.shape, dtype=sample.dtype)
        return _saved_by_few(spec, flow, model, names, tokens)


def _saved_by_few(
    spec: ModelSpec, flow: BlockFlow | None, model: nn.Module, names: Sequence[str], sample: Tensor
) -> list[int]:
    """Run three blocks of many that are alike, or all."""
    if len(names) <= 3 or not spec.repeats(model):
        return _saved_bytes(model, names, sample)
    passed_over, few = names[2:-1], [*names[:2], names[-1]]
    left_out = (
        _without(model, passed_over)
        if flow is None
        else stand_ins.without(model, flow, blocks=passed_over)
    )
    with left_out:
        start, block, inner, end, rest = _saved_bytes(model, few, sample)
    return [start, block, *[inner] * (len(names) - 2), end, rest]


@contextmanager
def _without(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Leave blocks out of a model for a while, as stages do."""
    taken = []
    for name in names:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        taken.append((owner, child, owner._modules[child]))
        owner._modules[child] = None
    try:
        yield
    finally:
        for owner, child, block in taken:
            owner._modules[child] = block


def _saved_bytes(model: nn.Module, names: Sequence[str], sample: Tensor) -> list[int]:
    """Return bytes that backward keeps: before the blocks, of each block, after them."""
    saved = [0] * (len(names) + 2)
    place = 0
    seen: set[int] = {storage_key(p) for p in model.parameters()}
    alive: list[Tensor] = []

    def move_to(index: int) -> None:
        nonlocal place
        place = index

    def count(tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in seen:
            seen.add(key)
            alive.append(tensor)  # or its address could be given to another
            saved[place] += tensor.untyped_storage().nbytes()
        return tensor

    with ExitStack() as stack:
        for index, name in enumerate(names, start=1):
            block = model.get_submodule(name)
            before = block.register_forward_pre_hook(lambda *_, i=index: move_to(i))
            after = block.register_forward_hook(
                lambda *_, i=index: move_to(-1 if i == len(names) else i)
            )
            stack.callback(before.remove)
            stack.callback(after.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(count, lambda t: t))
        training = model.training
        model.eval()  # neither running statistics nor random numbers move
        model(sample)
        model.train(training)
    return saved
