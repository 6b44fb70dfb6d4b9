"""Functions that ``tests/checkpoint/test_saver.py`` runs on each rank of a world of processes."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from axonlaunch import checkpoint
from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.format import step_folders
from axonlaunch.checkpoint.saving import dcp_writer, save_progress
from axonlaunch.checkpoint.saving.saver import SaveError, Saver
from axonlaunch.comm import World
from axonlaunch.comm.connection.rendezvous import local_place

RANKS = 2


def on_rank(rank: int, folder: str, check: str) -> Any:
    """Join a gloo world and run one of the functions below."""
    store = dist.FileStore(f"{folder}/store", RANKS)
    with World.join(local_place(rank, RANKS), backend="gloo", timeout_s=30, store=store) as world:
        run_dir = Path(folder) / "run"
        saver = Saver(run_dir, world=world, retention=Retention(newest=9), background=True)
        return CHECKS[check](world, saver, run_dir)


def waiting(world: World, saver: Saver, run_dir: Path) -> Any:
    """Save while the other rank, which has written its part, appears to be stuck."""
    del saver
    marker = run_dir.parent / "seen"

    def wrote() -> None:
        if world.rank == 0 and threading.current_thread() is not threading.main_thread():
            marker.touch()

    saver = Saver(run_dir, world=world, retention=Retention(newest=9), wrote=wrote)
    write = dcp_writer.Writer.write_data

    def write_slowly(self: dcp_writer.Writer, *args: Any) -> Any:
        while world.rank == 1 and not marker.exists():
            self._summing.wrote()
            time.sleep(0.01)
        return write(self, *args)

    with (
        mock.patch.object(dcp_writer.Writer, "write_data", write_slowly),
        mock.patch.object(save_progress, "_INTERVAL_S", 0.01),
    ):
        return [entry.step for entry in saver.save(state(), step=1, samples=8)]


def state() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (RANKS,))
    return {"model": {"weight": DTensor.from_local(torch.ones(4), mesh, [Shard(0)])}}


def changing(world: World, saver: Saver, run_dir: Path) -> Any:
    """Change the state while it is written."""
    saved = state()
    saver.save(saved, step=1, samples=8)
    saved["model"]["weight"].to_local().zero_()
    for _ in range(50):
        dist.all_reduce(torch.zeros(1))  # training continues during the save
    done = saver.close()
    read = state()
    newest = checkpoint.latest(run_dir)
    assert newest is not None
    checkpoint.load_checkpoint(newest, read, world=world)
    return read["model"]["weight"].full_tensor().tolist(), [entry.step for entry in done]


def twice(world: World, saver: Saver, run_dir: Path) -> Any:
    """Save again at once."""
    first = saver.save(state(), step=1, samples=8)
    second = saver.save(state(), step=2, samples=16)
    saver.take_completed(wait=True)
    assert [entry.step for entry in checkpoint.list_checkpoints(run_dir)] == [1, 2]
    return [entry.step for entry in first], [entry.step for entry in second]


def failing(world: World, saver: Saver, run_dir: Path) -> Any:
    """Save once successfully, and once with a full disk on one rank."""
    saver.save(state(), step=1, samples=8)
    saver.take_completed(wait=True)
    full = OSError(28, "No space left on device")
    broken = mock.patch.object(dcp_writer.DirectFile, "write", side_effect=full)
    if world.rank == 1:
        broken.start()
    saver.save(state(), step=2, samples=16)
    try:
        saver.take_completed(wait=True)
    except SaveError as error:
        steps = [entry.step for entry in checkpoint.list_checkpoints(run_dir)]
        return str(error), steps
    return "it passed", []


def early(world: World, saver: Saver, run_dir: Path) -> Any:
    """Save while the main rank is slow to remove an old partial save; return whether it was still
    there.
    """
    left = run_dir / "checkpoints" / "step_1.partial"
    if world.is_main:
        left.mkdir(parents=True)
    dist.barrier()
    met: list[bool] = []

    def slow(folder: Path) -> None:
        step_folders.prepare(folder)
        time.sleep(0.3)  # meanwhile the other ranks arrive
        met.append(left.exists())

    with mock.patch.object(dcp_writer, "prepare", slow):
        saver.save(state(), step=1, samples=8)
        saver.close()
    return met, [entry.step for entry in checkpoint.list_checkpoints(run_dir)]


def measured(world: World, saver: Saver, run_dir: Path) -> Any:
    """Return a save's host memory in excess of the state's size: at its peak, and afterwards."""
    mesh = init_device_mesh("cpu", (RANKS,))
    shards = {
        f"{n}": DTensor.from_local(torch.ones(2048, 2048), mesh, [Shard(0)]) for n in range(12)
    }
    size = sum(shard.to_local().nbytes for shard in shards.values())
    at_once = Saver(run_dir, world=world, retention=Retention(newest=9))
    small = Saver(run_dir, world=world, retention=Retention(newest=9), background=True)
    small.save(state(), step=1, samples=8)  # loads everything that is cached after the first save
    small.close()
    ratios = []
    for step, tried in enumerate((at_once, saver), start=2):
        initial, most, done = _anonymous_bytes(), [0], threading.Event()

        def watch(most: list[int] = most, done: threading.Event = done) -> None:
            while not done.wait(0.002):
                most.append(_anonymous_bytes())

        thread = threading.Thread(target=watch)
        thread.start()
        tried.save({"model": shards}, step=step, samples=8 * step)
        tried.close()
        done.set()
        thread.join()
        gc.collect()
        for _ in range(100):  # torch's thread frees the copy when it ends
            if _anonymous_bytes() - initial < 0.1 * size:
                break
            time.sleep(0.05)
        ratios.append(((max(most) - initial) / size, (_anonymous_bytes() - initial) / size))
    return ratios


def _anonymous_bytes() -> int:
    """Return the memory of this process that is not backed by files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [kib] = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(kib) * 1024


CHECKS = {
    "changing": changing,
    "twice": twice,
    "waiting": waiting,
    "failing": failing,
    "early": early,
    "measured": measured,
}
