"""What ``tests/checkpoint/test_saver.py`` does on each rank of a world of processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from axonlaunch import checkpoint
from axonlaunch.checkpoint import Retention, writer
from axonlaunch.checkpoint.saver import SaveError, Saver
from axonlaunch.comm import World
from axonlaunch.comm.rendezvous import local_place

RANKS = 2


def on_rank(rank: int, folder: str, check: str) -> Any:
    """Join a gloo world and do one of the functions below."""
    os.environ.update(local_place(rank, RANKS))
    store = dist.FileStore(f"{folder}/store", RANKS)
    with World.init(backend="gloo", timeout_s=30, store=store) as world:
        run_dir = Path(folder) / "run"
        saver = Saver(run_dir, world=world, retention=Retention(newest=9), background=True)
        return CHECKS[check](world, saver, run_dir)


def state() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (RANKS,))
    return {"model": {"weight": DTensor.from_local(torch.ones(4), mesh, [Shard(0)])}}


def changing(world: World, saver: Saver, run_dir: Path) -> Any:
    """Change the state while it is written."""
    held = state()
    saver.save(held, step=1, samples=8)
    held["model"]["weight"].to_local().zero_()
    for _ in range(50):
        dist.all_reduce(torch.zeros(1))  # training goes on beside it
    done = saver.close()
    read = state()
    found = checkpoint.latest(run_dir)
    assert found is not None
    checkpoint.load(found, read, world=world)
    return read["model"]["weight"].full_tensor().tolist(), [one.step for one in done]


def twice(world: World, saver: Saver, run_dir: Path) -> Any:
    """Save again at once."""
    first = saver.save(state(), step=1, samples=8)
    second = saver.save(state(), step=2, samples=16)
    saver.finished(wait=True)
    assert [one.step for one in checkpoint.listed(run_dir)] == [1, 2]
    return [one.step for one in first], [one.step for one in second]


def failing(world: World, saver: Saver, run_dir: Path) -> Any:
    """Save once well, and once where a rank's disk is full."""
    saver.save(state(), step=1, samples=8)
    saver.finished(wait=True)
    full = OSError(28, "No space left on device")
    broken = mock.patch.object(writer._SummedFile, "write", side_effect=full)
    if world.rank == 1:
        broken.start()
    saver.save(state(), step=2, samples=16)
    try:
        saver.finished(wait=True)
    except SaveError as error:
        steps = [one.step for one in checkpoint.listed(run_dir)]
        return str(error), steps
    return "it passed", []


CHECKS = {"changing": changing, "twice": twice, "failing": failing}
