"""Measures how fast this node's ranks compute and communicate, all at the same time.

The figures are those of ``HardwareConfig``. Ranks are measured together because they share cores,
caches and memory bandwidth.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from axonlaunch.comm import World
from axonlaunch.comm.connection.rendezvous import local_place
from axonlaunch.comm.torch_internals import all_gather_single
from axonlaunch.config.precision import PRECISIONS

_BUDGET_S = 0.15
"""Seconds spent on one figure; at least three calls are timed."""
_BETWEEN_S = 2e-3
"""Seconds that ranks compute before each collective."""
_SIDE = 512
"""Rows and columns of the multiplied matrices."""
_HEADS, _KEYS, _HEAD_DIM = 8, 512, 64
_HALF = 0.5
"""Fraction of the peak that ``planning.throughput.roofline`` assumes for attention to 512 keys."""
_CHAIN = 20
_LARGE = 4 * 2**20
"""Bytes of the collectives that measure bandwidth."""
_SAVED = 128 * 2**20
"""Bytes that all ranks together write to the disk."""
_MOVED = tuple(2**exponent for exponent in range(14, 28, 2))
"""Bytes that kernels read and write: from the first-level cache to newly mapped pages."""


def run_microbenchmarks(
    rank: int, ranks: int, threads: int, store: str, folder: str
) -> dict[str, Any]:
    """Run the benchmark on one rank; return the figures, which are the same on every rank.

    Args:
        rank: Rank of this process.
        ranks: Number of ranks.
        threads: Number of threads of this process.
        store: File of the store for the rendezvous.
        folder: Folder on the disk whose speed is measured.
    """
    torch.set_num_threads(threads)
    file_store = dist.FileStore(store, ranks)
    with World.join(local_place(rank, ranks), backend="gloo", timeout_s=120, store=file_store):
        talking = _talking(ranks) if ranks > 1 else {}
        return {**_computing(), **_moving(), **talking, **_saving(ranks, folder)}


def _computing() -> dict[str, Any]:
    figures = {}
    for precision in PRECISIONS.values():
        a = torch.ones(_SIDE, _SIDE, dtype=getattr(torch, precision.compute.dtype))
        figures[precision.peak] = 2 * _SIDE**3 / _seconds(partial(torch.matmul, a, a)) / 1e12
    q = torch.randn(1, _HEADS, _KEYS, _HEAD_DIM)
    attention = _seconds(lambda: scaled_dot_product_attention(q, q, q, is_causal=True))
    reached = 2 * _HEADS * _KEYS**2 * _HEAD_DIM / attention / 1e12
    share = reached / figures["fp32_tflops"] / _HALF
    return {**figures, "attention_efficiency": min(1.0, share)}


def _moving() -> dict[str, Any]:
    """Measure the time of the smallest kernel in training, and the extra time of larger ones."""
    x = torch.ones(8, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(_CHAIN):
            y = y * 2.0
        y.sum().backward()

    kernel = _seconds(chain) / (2 * _CHAIN)
    small = torch.ones(8)
    least = _seconds(lambda: small * 2.0)
    times = []
    for moved in _MOVED:
        values = torch.ones(moved // 2 // small.element_size())
        times.append(max(0.0, _seconds(partial(torch.mul, values, 2.0)) - least))
    return {
        "kernel_us": kernel * 1e6,
        "kernel_bytes": list(_MOVED),
        "kernel_latency_us": [seconds * 1e6 for seconds in times],
    }


def _talking(ranks: int) -> dict[str, Any]:
    small, many = torch.ones(1), torch.ones(_LARGE // 4)
    latency = _exchange_seconds(lambda: dist.all_reduce(small), tries=60)
    share = (ranks - 1) / ranks
    reduced = _exchange_seconds(lambda: dist.all_reduce(many), tries=16)
    part = torch.ones(_LARGE // 4 // ranks)
    gathered = _exchange_seconds(
        lambda: all_gather_single(torch.empty(part.numel() * ranks), part), tries=16
    )
    return {
        "link_latency_us": latency / (2 * (ranks - 1)) * 1e6,
        "link_gb_s": 2 * share * _LARGE / max(reduced - latency, reduced / 10) / 1e9,
        "allgather_bw_gb_s": share * _LARGE / max(gathered - latency, gathered / 10) / 1e9,
    }


def _saving(ranks: int, folder: str) -> dict[str, Any]:
    """Measure how fast all ranks together write files; empty if the folder can't be written to."""
    content = os.urandom(_SAVED // ranks)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:

            def write() -> None:
                file.seek(0)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

            seconds = _once(write)
    except OSError:
        seconds = 0.0  # the ranks must agree
    slowest = _largest_of_ranks(seconds)
    return {"disk_gb_s": _SAVED / slowest / 1e9} if slowest else {}


def _exchange_seconds(run: Callable[[], object], *, tries: int) -> float:
    """Return the mean time of a collective after a short computation, as in training.

    The mean includes the time spent waiting for ranks that temporarily lost their core.
    """
    a, times = torch.ones(128, 128), []
    run()
    for _ in range(tries):
        end = time.perf_counter() + _BETWEEN_S
        while time.perf_counter() < end:
            torch.relu(a @ a)
        times.append(_once(run))
    return _largest_of_ranks(statistics.mean(times))


def _seconds(run: Callable[[], object]) -> float:
    """Return the minimum time of a call that all ranks make together, on the slowest rank.

    The minimum excludes short disturbances by other programs.
    """
    tries = _largest_of_ranks(max(3.0, _BUDGET_S / max(_once(run), 1e-7)))
    return _largest_of_ranks(min(_once(run) for _ in range(min(300, int(tries)))))


def _once(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _largest_of_ranks(value: float) -> float:
    """Return the largest of all ranks' values."""
    agreed = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return float(agreed)
