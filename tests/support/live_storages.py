"""Trains small models in real gloo processes and reports the memory of their storages.

The processes are forked from the tests' server, so callers must use its fixture.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axonlaunch import data
from axonlaunch.comm import World
from axonlaunch.comm.connection.rendezvous import local_place
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.data.datasets.dataset import Batch, sample_inputs
from axonlaunch.data.datasets.loader import rank_loader
from axonlaunch.engines.build import Source, build_engine
from axonlaunch.engines.data_parallel.fsdp_memory import FSDPMemoryStats
from axonlaunch.engines.engine import Engine
from axonlaunch.models.build import spec_for
from axonlaunch.planning.memory.live_peak import WATCHED, CpuPeakMemory
from axonlaunch.planning.tracing.devices import gloo_buffers
from axonlaunch.planning.tracing.engine_categories import host_categories
from axonlaunch.planning.tracing.extrapolation import extrapolate_depth, extrapolate_schedule
from axonlaunch.planning.tracing.stage_trace import measure_stage
from axonlaunch.planning.tracing.storage_trace import CATEGORIES, StorageTrace, on_device
from axonlaunch.system.processes import forked_call
from support.configured import run_config
from support.forced_router import forced_routes
from support.gloo_threads import freeing_at_once

SMALL = [
    "model.hidden_size=64",
    "model.num_hidden_layers=3",
    "model.num_attention_heads=4",
    "data=synthetic_tokens",
    "data.sequence_length=32",
    "train.global_batch_size=8",
]

Held = dict[str, int]
Stats = tuple[FSDPMemoryStats | None, dict[int, int]]


def held(cases: Sequence[tuple[str, ...]], *, ranks: int) -> list[list[Held]]:
    """Train each case's overrides on ranks of this node, one case after another.

    Routers of experts that are divided among ranks have the load of ``estimate.routing``.

    Returns:
        By case, then by rank: bytes at the peak of a steady step by category, ``total``, and the
            bytes of the ``evaluation``. ``context_rank`` is the rank's index in the ring of
            attention.
    """
    return _by_case("support.live_storages:_on_rank", cases, ranks=ranks)


def measured(cases: Sequence[tuple[str, ...]], *, ranks: int) -> list[list[int]]:
    """Train each case's overrides and return the peak that a run reports, by case and rank."""
    return _by_case("support.live_storages:_measured_on_rank", cases, ranks=ranks)


def _by_case(function: str, cases: Sequence[tuple[str, ...]], *, ranks: int) -> list[list[Any]]:
    context = multiprocessing.get_context("forkserver")
    configs = [chosen(case, ranks=ranks) for case in cases]  # once, as in a command
    with tempfile.TemporaryDirectory() as folder:
        calls = [(configs, rank, ranks, folder) for rank in range(ranks)]
        by_rank = forked_call.call_together(context, function, calls)
    return [list(of_ranks) for of_ranks in zip(*by_rank, strict=True)]


def stats(overrides: tuple[str, ...], *, ranks: int) -> list[Stats]:
    """Train on ranks of this node and return the statistics of their engines.

    Returns:
        By rank: ``FSDPMemoryStats`` of sharded parameters, if there are any, and bytes of
            activations that a micro-batch left on each stage.
    """
    context = multiprocessing.get_context("forkserver")
    config = chosen(overrides, ranks=ranks)
    with tempfile.TemporaryDirectory() as folder:
        calls = [(config, rank, ranks, folder) for rank in range(ranks)]
        return forked_call.call_together(context, "support.live_storages:_stats_on_rank", calls)


def _stats_on_rank(config: RunConfig, rank: int, ranks: int, folder: str) -> Stats:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    with World.join(local_place(rank, ranks), backend="gloo", store=store) as world:
        trace = StorageTrace()
        extrapolate_schedule.watch_actions(trace)
        engine, batch = _engine(config, world, storing=lambda: trace)
        with trace:
            for _ in range(2):
                engine.backward(batch)
                trace.begin("update")
                engine.update()
                stats = engine.memory_stats()
                trace.finish()
                left = extrapolate_schedule.left_by_forward(trace.events)
                trace.forget()
        return stats, left


def _on_rank(configs: Sequence[RunConfig], rank: int, ranks: int, folder: str) -> list[Held]:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    with World.join(local_place(rank, ranks), backend="gloo", store=store) as world:
        results = []
        for config in configs:
            with forced_routes(config.estimate.expert_load):
                results.append(_together(_held(config, world)))
        return results


def _measured_on_rank(
    configs: Sequence[RunConfig], rank: int, ranks: int, folder: str
) -> list[int | None]:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    with World.join(local_place(rank, ranks), backend="gloo", store=store) as world:
        return [_together(_measured(config, world)) for config in configs]


def _together(result: Any) -> Any:
    """Return a rank's result when all ranks have theirs: exiting resets a rank's connections."""
    dist.barrier()
    return result


def _measured(config: RunConfig, world: World) -> int | None:
    live = CpuPeakMemory(config)
    engine, batch = _engine(config, world, storing=live.storing)
    with freeing_at_once():
        for _ in range(WATCHED):
            with live.step(engine):
                engine.train_step(batch)
    return live.peak_bytes()


def chosen(overrides: Sequence[str], *, ranks: int) -> RunConfig:
    """Return a small model's configuration as a command resolves it."""
    return run_config([*small(overrides), f"launch.nproc={ranks}", *overrides])


def small(overrides: Sequence[str]) -> list[str]:
    """Return overrides that make a run small. Models of transformers have their sizes in their
    folder.
    """
    is_theirs = "model=hf" in overrides
    return [word for word in SMALL if not (is_theirs and word.startswith("model."))]


def _engine(
    config: RunConfig, world: World, *, storing: Callable[[], AbstractContextManager[Any]]
) -> tuple[Engine, Batch]:
    layout = Layout.of(config, world_size=world.world_size)
    loader = rank_loader(
        config, data.build_dataset(config.data, config.tokenizer), layout=layout, rank=world.rank
    )
    batch = loader.batch(0)
    # Create meshes before there is any storage, because they hold a few bytes on the host.
    source = Source(storing=storing)
    return build_engine(config, world, sample=sample_inputs(loader.dataset), source=source), batch


def _held(config: RunConfig, world: World) -> Held:
    trace = StorageTrace(on_host=host_categories(config), workspaces=gloo_buffers.untraced_buffers)
    engine, batch = _engine(config, world, storing=lambda: trace)
    with freeing_at_once(), trace:
        engine.backward(batch)
        with trace.during("temporary"):
            engine.update()
        measure_stage(engine, batch, trace, spec=spec_for(config.model))
        point, host = extrapolate_depth.peak(trace.events)
        trace.forget()
        engine.evaluate(batch)
        trace.finish()
    categories = dict(zip(CATEGORIES, point, strict=False))
    evaluation = on_device(extrapolate_depth.peak(trace.events)[0])
    position = Layout.of(config, world_size=world.world_size).coordinates(world.rank)["cp"]
    return {
        **categories,
        "total": on_device(point),
        "host": host,
        "evaluation": evaluation,
        "context_rank": position,
    }
