"""Measures the samples per second of a loader with and without ``data.workers``.

A sample takes a pause, as for a slow disk, and the time of an augmentation in Python and torch. The
numbers of workers take turns in each round; a ratio compares medians with reading in one process.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterable
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from axonlaunch.data.datasets.loader import Loader
from axonlaunch.data.datasets.user_datasets.adapters import adapt_dataset


class Images:
    """Images that take a pause to read, and are noised and flipped at random."""

    num_classes = 4

    def __init__(self, pause: float, size: int) -> None:
        self.pause, self.size = pause, size

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.pause)
        image = torch.full((3, self.size, self.size), index % 4.0)
        image = image + torch.randn(3, self.size, self.size)
        return (image.flip(-1) if random.random() < 0.5 else image), index % 4


def samples_per_s(args: argparse.Namespace, workers: int) -> float:
    """Return the rate of the steps after the first two, in which workers start."""
    dataset = adapt_dataset(
        Images(args.pause_ms / 1e3, args.size),
        collate=None,
        eval_fraction=0,
        num_classes=None,
        refusal=ValueError,
        description="bench",
    )
    options: dict[str, Any] = {"global_batch_size": args.batch, "micro_batch_size": args.micro}
    loader = Loader(dataset, seed=0, num_workers=workers, **options)
    with closing(loader.iterate()) as batches:
        drain(islice(batches, 2))
        began = time.perf_counter()
        drain(islice(batches, args.steps))
        return float(args.steps * args.batch / (time.perf_counter() - began))


def drain(batches: Iterable[object]) -> None:
    """Read all batches."""
    for _ in batches:
        pass


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
parser.add_argument("--pause-ms", type=float, default=10.0)
parser.add_argument("--size", type=int, default=64)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--micro", type=int, default=8)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--rounds", type=int, default=3)

if __name__ == "__main__":
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rates: dict[int, list[float]] = {workers: [] for workers in chosen.workers}
    for _ in range(chosen.rounds):
        for count in chosen.workers:
            rates[count].append(samples_per_s(chosen, count))
    first = statistics.median(rates[chosen.workers[0]])
    print(f"a sample takes a pause of {chosen.pause_ms:g} ms; batches of {chosen.batch}")
    for count, found in rates.items():
        rate = statistics.median(found)
        print(f"data.workers={count}: {rate:8.1f} samples/s, {rate / first:.2f} times")
