"""How much memory each rank of a run would hold, found by running its engine on nothing.

The real engine is built for one rank of each pipeline stage, in a world without the others and on
tensors without bytes, and does a step after its optimizer has made its states. What can't be traced
so is refused.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeAlias

import torch
from torch import nn

from axonlaunch.config import ConfigError, Problem, RunConfig
from axonlaunch.data.dataset import Batch
from axonlaunch.engines.base import Engine
from axonlaunch.engines.fsdp import CPUOffload
from axonlaunch.models.build import spec_for
from axonlaunch.models.spec import ModelSpec
from axonlaunch.planning import actions, depth, fake_world, forked, process
from axonlaunch.planning.blueprint import Blueprint
from axonlaunch.planning.dry_run import DryRun
from axonlaunch.planning.record import GIB, Estimate, RankEstimate
from axonlaunch.planning.trace import CATEGORIES, Category, Event, StorageTrace, on_device

_ON_HOST: dict[CPUOffload, tuple[Category, ...]] = {
    CPUOffload.NONE: (),
    CPUOffload.PARAMS: ("parameters", "gradients"),
    CPUOffload.OPTIMIZER_STATES: ("optimizer",),
    CPUOffload.FULL: ("parameters", "gradients", "optimizer"),
}

_Key: TypeAlias = tuple[int, tuple[int, ...]]


def estimate(config: RunConfig, *, exact: bool = False) -> Estimate:
    """Foretell the memory of every rank of a run.

    Bytes are those of live storages, as ``StorageTrace`` counts them: all samples of a rank's step
    are counted as on its device, and what passes through the device on the way from and to host
    memory, a layer or a parameter at a time, is not. What is compiled is counted as if it were
    not, which holds more.

    Args:
        config: Checked, with ``launch.nproc`` resolved: the ranks of the world.
        exact: Whether to trace every block and micro-batch; else two shallow models stand for a
            deep one, which gives the same bytes wherever blocks are equal, and a short step in a
            short pipeline for a long one, which gives them to one activation between stages.

    Raises:
        ConfigError: The run can't be traced.
    """
    blueprint = Blueprint.of(config)
    shares = blueprint.shares
    a_stage = blueprint.world_size // shares.pipeline
    ranks = []
    for place, events in enumerate(_by_stage(blueprint, exact=exact)):
        ranks.append(_of_rank(shares.axes, place * a_stage, events))
    highest = max(ranks, key=lambda one: one.peak_bytes)
    memory = None
    if config.hardware is not None and config.hardware.memory_gib is not None:
        memory = int(config.hardware.memory_gib * GIB)
    reserved = held = highest.peak_bytes
    if config.hardware is None or config.hardware.name != "cpu":
        found = _process(blueprint, highest, memory=memory)
        reserved, held = found.allocator, found.process
    return Estimate(
        world_size=blueprint.world_size,
        mesh=shares.axes,
        parameters=sum(p.numel() for p in blueprint.model.parameters()),
        peak_bytes=highest.peak_bytes,
        reserved_bytes=reserved,
        process_bytes=held,
        fits=None if memory is None else held <= memory,
        ranks=ranks,
    )


def _by_stage(blueprint: Blueprint, *, exact: bool) -> list[list[Event]]:
    """Return the second step of the first rank of each place on the pp axis.

    Places that are alike share their traces.
    """
    places = [
        _Place.of(blueprint, place, exact=exact) for place in range(blueprint.shares.pipeline)
    ]
    runs = {key: run for place in places for key, run in place.traces().items()}
    traced = dict(zip(runs, forked.run([*runs.values()]), strict=True))
    return [place.events(traced) for place in places]


@dataclass(frozen=True)
class _Traced:
    """A step, and the bytes that a micro-batch brings before anything is computed.

    Attributes:
        events: The step's.
        fed: Samples and targets of a micro-batch; without a pipeline, where no action shows it,
            also its loss, which is kept.
        received: Buffers for what other stages send of one.
    """

    events: list[Event]
    fed: int
    received: int


@dataclass(frozen=True)
class _Place:
    """A place on the pp axis, and the shorter and shallower runs that tell of it.

    Attributes:
        whole: The run.
        place: Its place there.
        short: A run of fewer micro-batches in a shorter pipeline.
        like: Its place there.
        spare: Blocks of each of its stages that need not be traced.
    """

    whole: Blueprint
    place: int
    short: Blueprint
    like: int
    spare: int

    @classmethod
    def of(cls, blueprint: Blueprint, place: int, *, exact: bool) -> Self:
        short, like = (blueprint, place) if exact else blueprint.shorter(place)
        spare = 0 if exact else short.spare_blocks(short.stages_of(like))
        return cls(blueprint, place, short, like, spare if spare > 1 else 0)

    @property
    def short_rank(self) -> int:
        """The first rank of the place in the short run."""
        return self.like * self.short.world_size // self.short.shares.pipeline

    def traces(self) -> dict[_Key, Callable[[], _Traced]]:
        """Return what has to be run, by what tells one run from another."""
        return {
            key: partial(_traced, self._without(fewer), self.short_rank)
            for key, fewer in self._keys().items()
        }

    def events(self, traced: Mapping[_Key, _Traced]) -> list[Event]:
        """Return the place's step."""
        told = [traced[key] for key in self._keys()]
        events = told[0].events
        if self.spare:
            events = depth.deepened(events, told[1].events, blocks=self.spare)
        short, whole = self.short.shares, self.whole.shares
        more = dict.fromkeys(CATEGORIES, 0)
        more["activations"] = (whole.micro_batches - short.micro_batches) * told[0].fed
        more["communication"] = (whole.round_microbatches - short.round_microbatches) * told[
            0
        ].received
        events = [actions.shifted(event, (*more.values(), 0)) for event in events]
        if whole.pipeline == 1 or short == whole:
            return events
        step = self.whole.schedule.actions[self.place]
        return actions.prolonged(events, rounds=[step] * min(2, whole.rounds))

    def _keys(self) -> dict[_Key, int]:
        depths = (self.spare, self.spare - 1) if self.spare else (0,)
        return {(self.like, tuple(self._without(fewer).counts)): fewer for fewer in depths}

    def _without(self, blocks: int) -> Blueprint:
        if not blocks:
            return self.short
        return self.short.without(blocks, self.short.stages_of(self.like))


def _process(blueprint: Blueprint, highest: RankEstimate, *, memory: int | None) -> process.Held:
    """Return what the process of the highest rank holds of a GPU with so many bytes.

    What the allocator keeps beside tensors is that of the shorter run.
    """
    place = _Place.of(blueprint, highest.coords["pp"], exact=False)
    record = partial(
        process.record,
        place.short,
        rank=place.short_rank,
        stages=place.short.stages_of(place.like),
        on_host=host_categories(blueprint.config),
    )
    groups = list(blueprint.shares.axes.values())
    rest = process.CUDA_CONTEXT + process.communicators(groups)
    [changes] = forked.run([record])
    return process.held(
        changes,
        peak_bytes=highest.peak_bytes,
        groups=groups,
        capacity=None if memory is None else max(0, memory - rest),
    )


def _of_rank(mesh: dict[str, int], rank: int, events: list[Event]) -> RankEstimate:
    point, host = depth.peak(events)
    inner, coords = math.prod(mesh.values()), {}
    for axis, size in mesh.items():
        inner //= size
        coords[axis] = rank // inner % size
    return RankEstimate(
        rank=rank,
        coords=coords,
        peak_bytes=on_device(point),
        host_bytes=host,
        breakdown=dict(zip(CATEGORIES, point, strict=False)),
    )


def _traced(blueprint: Blueprint, rank: int) -> _Traced:
    """Trace one rank's step, in a process of its own."""
    trace = StorageTrace(on_host=host_categories(blueprint.config))
    actions.watch(trace)
    try:
        world = fake_world.join(rank=rank, world_size=blueprint.world_size)
        dry = DryRun(blueprint, world, trace=trace)
        with dry.storing():
            batch, spec = dry.batch(), spec_for(blueprint.config.model)
            dry.settle()
            measure(dry.engine, batch, trace, spec=spec, updating=fake_world.answering_yes)
    except fake_world.UNTRACEABLE as error:
        raise ConfigError([_untraceable(blueprint.config, error)]) from error
    fed = (batch.inputs.nbytes + batch.targets.nbytes) // blueprint.shares.micro_batches
    if blueprint.shares.pipeline == 1:
        fed += torch.float32.itemsize
    return _Traced(trace.events, fed, dry.received_bytes)


def measure(
    engine: Engine,
    batch: Batch,
    trace: StorageTrace,
    *,
    spec: ModelSpec,
    updating: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Do a step in an entered trace and leave it with the step's events.

    Args:
        engine: A rank's, whose optimizer has its states.
        batch: The rank's samples of a step.
        trace: What follows storages.
        spec: The model's.
        updating: What surrounds the update.
    """
    for module in engine.modules:
        trace.tag([*module.parameters(), *module.buffers()], "parameters")
    trace.tag(engine.state_dict()["optimizer"].values(), "optimizer")
    trace.follow(parameter for _, parameter in engine.named_parameters())
    blocks = {n: [*spec.blocks(module).values()] for n, module in enumerate(engine.modules)}
    depth.watch(blocks, trace)
    trace.forget()
    engine.backward(batch)
    trace.begin("update")
    with trace.during("temporary"), updating():
        engine.update()
    trace.finish()


def host_categories(config: RunConfig) -> tuple[Category, ...]:
    """Return what a run keeps in host memory."""
    if config.strategy.data_parallel != "fsdp":
        return ()
    return _ON_HOST[CPUOffload(config.strategy.fsdp.cpu_offload)]


def _untraceable(config: RunConfig, error: BaseException) -> Problem:
    """Say which operation of which module needs values."""
    module = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = frame.f_locals.get("self")
        if isinstance(found, nn.Module):
            module = type(found).__name__
    where = "" if module is None else f" in {module}"
    message = (
        f"{fake_world.operation(error)}{where} depends on values or has no fake kernel, so memory "
        "can't be told without running it"
    )
    return Problem("model.name", message, config.model.name)
