"""Saves and loads 1.2 GB, compared with dd, reading the files and torch.save on the same disk."""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from axonlaunch.checkpoint import Retention, latest, load_checkpoint
from axonlaunch.checkpoint.saving.saver import Completed, Saver
from axonlaunch.comm import World
from axonlaunch.comm.connection.rendezvous import local_place
from axonlaunch.system.processes import forked_call

TENSORS, ROWS, COLUMNS = 25, 2000, 2000  # 100 million parameters, two states of each
MB = 1e6
SILENT = subprocess.DEVNULL


def state(ranks: int) -> dict[str, dict[str, DTensor]]:
    mesh = init_device_mesh("cpu", (ranks,))

    def shard() -> DTensor:
        return DTensor.from_local(torch.randn(ROWS // ranks, COLUMNS), mesh, [Shard(0)])

    names = [f"layers.{n}.weight" for n in range(TENSORS)]
    optimizer = {f"{n}.{kind}": shard() for n in names for kind in ("exp_avg", "exp_avg_sq")}
    return {"model": {n: shard() for n in names}, "optimizer": optimizer}


def seconds(work: Callable[[], object]) -> float:
    os.sync()  # finishes earlier writes before the measurement
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def direct(file: Path, size: int) -> list[str]:
    """Return a command that writes ``size`` bytes directly to the disk, at low priority."""
    count = f"count={round(size / (16 << 20))}"
    dd = ["dd", "if=/dev/zero", f"of={file}", "bs=16M", count, "oflag=direct"]
    return ["nice", "-n", "19", *dd]


def copied(sharded: dict[str, dict[str, DTensor]]) -> list[torch.Tensor]:
    return [t.to_local().clone() for part in sharded.values() for t in part.values()]


def forget(folder: Path) -> None:
    """Remove files from the kernel's cache, so that they are read from the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read(files: list[Path]) -> None:
    for file in files:
        file.read_bytes()


def on_rank(rank: int, ranks: int, folder: str, repeats: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    here = Path(folder)
    timings: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        timings.setdefault(name, []).append(value)

    store = dist.FileStore(str(here / "store"), ranks)
    with World.join(local_place(rank, ranks), backend="gloo", store=store) as world:
        sharded = state(ranks)
        size = sum(t.nbytes for part in sharded.values() for t in part.values())
        keep = Retention(newest=1)
        now = Saver(here / "run", world=world, retention=keep)
        later = Saver(here / "later", world=world, retention=keep, background=True)
        a, b = torch.randn(1000, 1000), torch.randn(1000, 1000)

        def step() -> float:
            began = time.perf_counter()
            for _ in range(4):
                a @ b
            dist.all_reduce(torch.zeros(1))
            return time.perf_counter() - began

        def dd() -> None:
            if world.is_main:
                (here / "dd").unlink(missing_ok=True)
                count = f"count={round(size / MB)}"
                overrides = ["dd", "if=/dev/zero", f"of={here}/dd", "bs=1MB", count, "conv=fsync"]
                subprocess.run(overrides, check=True, capture_output=True)

        def torch_save() -> None:
            local = {
                kind: {n: t.to_local() for n, t in part.items()} for kind, part in sharded.items()
            }
            (here / f"torch_{rank}").unlink(missing_ok=True)
            with (here / f"torch_{rank}").open("wb") as file:
                torch.save(local, file)
                file.flush()
                os.fsync(file.fileno())

        for repeat in range(repeats):
            note("dd with fsync", seconds(dd))
            note("torch.save with fsync, a file a rank", seconds(torch_save))
            note("save", seconds(partial(now.save, sharded, step=3 * repeat + 1, samples=0)))
            now.close()
            newest = latest(here / "run")
            assert newest is not None
            mine = sorted(newest.path.iterdir())[rank::ranks]
            loaded = (
                "load, checksums included",
                partial(load_checkpoint, newest, sharded, world=world),
            )
            full = "read the files", partial(read, mine)
            for name, work in (full, loaded, loaded, full):  # a disk's speed varies over time
                if world.is_main:
                    forget(here)
                note(name, seconds(work))

            def beside(is_going_on: Callable[[], bool]) -> float:
                times, writing = [], torch.ones(1)
                while writing:
                    times.append(step())
                    writing.fill_(is_going_on())
                    dist.all_reduce(writing, op=dist.ReduceOp.MAX)
                return statistics.median(times)

            note("copy of the state", seconds(lambda: copied(sharded)))
            usual = statistics.median(step() for _ in range(15))
            began = time.perf_counter()
            later.save(sharded, step=3 * repeat + 2, samples=0)
            note("stall of a save in the background", time.perf_counter() - began)
            done: list[Completed] = []

            def is_saving(done: list[Completed] = done) -> bool:
                done += later.take_completed()
                return not done

            note("steps beside it, relative", beside(is_saving) / usual)
            later.close()
            note("copy of the state", seconds(lambda: copied(sharded)))
            usual = statistics.median(step() for _ in range(15))
            command = direct(here / f"direct_{rank}", size // ranks)
            writer = subprocess.Popen(command, stdout=SILENT, stderr=SILENT)

            def is_writing(writer: subprocess.Popen[bytes] = writer) -> bool:
                return writer.poll() is None

            of_dd = beside(is_writing) / usual
            note("steps beside dd of as much past the cache, relative", of_dd)
    timings["megabytes"] = [size / MB]
    return timings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None, help="folder on the measured disk")
    args = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["axonlaunch.launch.local.preload"])
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        calls = [(rank, args.ranks, folder, args.repeats) for rank in range(args.ranks)]
        times = forked_call.call_together(context, "checkpoint:on_rank", calls)[0]
    [size] = times.pop("megabytes")
    print(f"{size:.0f} MB on {args.ranks} ranks, medians of {args.repeats}")
    for name, values in times.items():
        value = statistics.median(values)
        if "relative" in name:
            print(f"{name:<52} {value:>8.3f}")
        else:
            print(f"{name:<52} {value:>7.2f} s  {size / value:>6.0f} MB/s")
    for ours, theirs in (("save", "dd with fsync"), ("load, checksums included", "read the files")):
        ratio = statistics.median(t / o for o, t in zip(times[ours], times[theirs], strict=True))
        print(f"{ours} at {ratio:.2f} of {theirs}")


if __name__ == "__main__":
    main()
