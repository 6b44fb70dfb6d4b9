"""How much memory each rank of a run would hold, found by running its engine on nothing.

The real engine is built for one rank of each pipeline stage, in a world without the others and on
tensors without bytes, and does two steps; the second is measured. What can't be traced so is
refused.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import nn

from axonlaunch.config import ConfigError, Problem, RunConfig
from axonlaunch.data.dataset import Batch
from axonlaunch.engines.base import Engine
from axonlaunch.engines.fsdp import CPUOffload
from axonlaunch.models.build import spec_for
from axonlaunch.models.spec import ModelSpec
from axonlaunch.planning import depth, fake_world, forked, process
from axonlaunch.planning.dry_run import Blueprint, DryRun
from axonlaunch.planning.record import GIB, Estimate, RankEstimate
from axonlaunch.planning.trace import CATEGORIES, Category, Event, StorageTrace, on_device

_ON_HOST: dict[CPUOffload, tuple[Category, ...]] = {
    CPUOffload.NONE: (),
    CPUOffload.PARAMS: ("parameters", "gradients"),
    CPUOffload.OPTIMIZER_STATES: ("optimizer",),
    CPUOffload.FULL: ("parameters", "gradients", "optimizer"),
}


def estimate(config: RunConfig, *, exact: bool = False) -> Estimate:
    """Foretell the memory of every rank of a run.

    Bytes are those of live storages, as ``StorageTrace`` counts them: all samples of a rank's step
    are counted as on its device, and what passes through the device on the way from and to host
    memory, a layer or a parameter at a time, is not. What is compiled is counted as if it were
    not, which holds more.

    Args:
        config: Checked, with ``launch.nproc`` resolved: the ranks of the world.
        exact: Whether to trace every block; else two shallow models stand for a deep one, which
            gives the same bytes wherever blocks are equal.

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
    """Trace the first rank of each place on the pp axis; return each one's second step."""
    places = range(blueprint.shares.pipeline)
    a_stage = blueprint.world_size // len(places)
    spare, runs = [], []
    for place in places:
        stages = blueprint.stages_of(place)
        blocks = 0 if exact else blueprint.spare_blocks(stages)
        spare.append(blocks if blocks > 1 else 0)
        for fewer in (spare[-1], spare[-1] - 1) if spare[-1] else (0,):
            shallow = blueprint.without(fewer, stages) if fewer else blueprint
            runs.append(partial(_events, shallow, place * a_stage))
    traced = iter(forked.run(runs))
    return [
        depth.deepened(next(traced), next(traced), blocks=blocks) if blocks else next(traced)
        for blocks in spare
    ]


def _process(blueprint: Blueprint, highest: RankEstimate, *, memory: int | None) -> process.Held:
    """Return what the process of the highest rank holds of a GPU with so many bytes."""
    record = partial(
        process.record,
        blueprint,
        rank=highest.rank,
        stages=blueprint.stages_of(highest.coords["pp"]),
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


def _events(blueprint: Blueprint, rank: int) -> list[Event]:
    """Trace one rank's step, in a process of its own."""
    trace = StorageTrace(on_host=host_categories(blueprint.config))
    try:
        world = fake_world.join(rank=rank, world_size=blueprint.world_size)
        dry = DryRun(blueprint, world, trace=trace)
        with dry.storing():
            spec = spec_for(blueprint.config.model)
            measure(dry.engine, dry.batch(), trace, spec=spec, updating=fake_world.answering_yes)
    except fake_world.UNTRACEABLE as error:
        raise ConfigError([_untraceable(blueprint.config, error)]) from error
    return trace.events


def measure(
    engine: Engine,
    batch: Batch,
    trace: StorageTrace,
    *,
    spec: ModelSpec,
    updating: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Do two steps in an entered trace and leave it with the second's events.

    The first makes the optimizer's states, buffers that stay, and torch's own plans for DTensors,
    which it makes on tensors of global shape.

    Args:
        engine: A rank's.
        batch: The rank's samples of a step.
        trace: What follows storages.
        spec: The model's.
        updating: What surrounds the update.
    """
    _step(engine, batch, trace, updating)
    state = engine.state_dict()
    trace.tag(state["model"].values(), "parameters")
    trace.tag(state["optimizer"].values(), "optimizer")
    del state
    trace.follow(parameter for _, parameter in engine.named_parameters())
    blocks = {n: [*spec.blocks(module).values()] for n, module in enumerate(engine.modules)}
    depth.watch(blocks, trace)
    trace.forget()
    _step(engine, batch, trace, updating)
    trace.finish()


def _step(
    engine: Engine,
    batch: Batch,
    trace: StorageTrace,
    updating: Callable[[], AbstractContextManager[None]],
) -> None:
    engine.backward(batch)
    trace.begin("update")
    with trace.during("temporary"), updating():
        engine.update()


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
