"""How much memory each rank of a run would hold, found by running its engine on nothing.

The real engine is built for one rank of each pipeline stage, in a world without the others and on
tensors without bytes, and does a step after its optimizer has made its states. What can't be traced
so is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from axonlaunch.config import RunConfig
from axonlaunch.planning import depth, fake_tensors, forked, process
from axonlaunch.planning.blueprint import Blueprint
from axonlaunch.planning.place import Place, host_categories
from axonlaunch.planning.record import Estimate, RankEstimate
from axonlaunch.planning.reserved import Change
from axonlaunch.planning.trace import CATEGORIES, Event, on_device


def estimate(config: RunConfig, *, exact: bool = False, ends: bool = False) -> Estimate:
    """Foretell the memory of every rank of a run.

    Bytes are those of live storages, as ``StorageTrace`` counts them: all samples of a rank's step
    are counted as on its device, and what passes through the device on the way from and to host
    memory, a layer or a parameter at a time, is not. Of what is compiled it is the wrappers of
    kernels that are followed, which allocate.

    Args:
        config: Checked, with ``launch.nproc`` resolved: the ranks of the world.
        exact: Whether to trace every block and micro-batch; else two shallow models stand for a
            deep one, which gives the same bytes wherever blocks are equal, and a short step in a
            short pipeline for a long one, which gives them to one activation between stages.
        ends: Whether to tell only of the first two places on the pp axis and the last: between
            them ranks hold less and less, if blocks are dealt out evenly.

    Raises:
        ConfigError: The run can't be traced.
    """
    blueprint = Blueprint.of(config)
    shares = blueprint.shares
    where: Sequence[int] = range(shares.pipeline)
    if ends:
        where = sorted({*where[:2], where[-1]})
    places = [Place.of(blueprint, one, exact=exact) for one in where]
    runs: dict[Any, Callable[[], Any]] = {}
    hardware = config.hardware
    on_gpu = hardware is None or not hardware.is_cpu
    if on_gpu:  # the longest to run, and the first place most often holds most
        runs["process", 0] = _recorded(blueprint, 0)
    for place in places:
        runs.update(place.traces())
    done = dict(zip(runs, forked.run([*runs.values()], memory=fake_tensors.recipes), strict=True))
    a_stage = blueprint.world_size // shares.pipeline
    steps = {place.kind: place for place in places}
    short = {kind: place.short_step(done) for kind, place in steps.items()}
    ranks = [_of_rank(place, place.place * a_stage, short[place.kind], done) for place in places]
    highest = max(ranks, key=lambda one: one.peak_bytes)
    memory = hardware.memory_bytes if hardware else None
    reserved = held = highest.peak_bytes
    if on_gpu:
        whose = "process", highest.coords["pp"]
        if whose not in done:
            [done[whose]] = forked.run([_recorded(blueprint, whose[1])])
        found = _process(blueprint, highest, done[whose], memory=memory)
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


def _recorded(blueprint: Blueprint, place: int) -> Callable[[], list[Change]]:
    """Return the run that tells what a rank asks of its allocator, in a shorter step."""
    found = Place.of(blueprint, place, exact=False)
    return partial(
        process.record,
        found.short,
        rank=found.short_rank,
        stages=found.short.stages_of(found.like),
        on_host=host_categories(blueprint.config),
    )


def _process(
    blueprint: Blueprint, highest: RankEstimate, changes: list[Change], *, memory: int | None
) -> process.Held:
    """Return what the process of the highest rank holds of a GPU with so many bytes.

    What the allocator keeps beside tensors is that of the shorter step.
    """
    groups = list(blueprint.shares.axes.values())
    rest = process.CUDA_CONTEXT + process.communicators(groups)
    return process.held(
        changes,
        peak_bytes=highest.peak_bytes,
        groups=groups,
        capacity=None if memory is None else max(0, memory - rest),
    )


def _of_rank(
    place: Place, rank: int, short_step: list[Event], done: Mapping[Any, Any]
) -> RankEstimate:
    point, host = depth.peak(place.events(short_step, done))
    return RankEstimate(
        rank=rank,
        coords=place.whole.shares.coordinates(rank),
        peak_bytes=on_device(point),
        host_bytes=host,
        breakdown=dict(zip(CATEGORIES, point, strict=False)),
        sharded_parameters=place.sharded(done),
        microbatch_bytes=place.left_by_forward(short_step),
    )
