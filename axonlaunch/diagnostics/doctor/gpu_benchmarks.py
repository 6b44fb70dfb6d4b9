"""Times the kernels of a model, copies, launches and links on the GPUs of this node, all at once.

The results are times of work of stated sizes. ``planning.throughput.measured_gpus`` derives the
figures of ``HardwareConfig`` from them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from axonlaunch.comm import World
from axonlaunch.comm.connection.rendezvous import local_place
from axonlaunch.comm.torch_internals import all_gather_single
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.system.text.formatting import MIB

_SHAPES = ((8192, 8192, 8192), (8192, 14336, 4096), (8192, 4096, 14336))
"""Rows, columns and depth of products: a large one, and those of a block of Llama 3 8B."""
_HEADS, _POSITIONS, _HEAD_DIM = 32, 8192, 128
_ROWS, _WIDTH = 16384, 8192
"""Sizes of the tensor that norms and additions read."""
_COPIED = 256 * MIB
_REDUCED = 256 * MIB
_WRITTEN = 256 * MIB
"""Bytes that all ranks together write to the disk."""
_QUEUED = 1000
"""Smallest kernels in a CUDA graph."""
_CALLS, _ROUNDS = 10, 5

Sizes: TypeAlias = dict[str, Any]
"""Kind and sizes of timed work."""
Clock: TypeAlias = Callable[[Callable[[], object], Sizes], float]
"""Runs work and returns the seconds of one call, also given its sizes."""


def run_gpu_benchmarks(rank: int, ranks: int, store: str, folder: str) -> dict[str, Any]:
    """Run the benchmarks on one rank, in a process forked for it.

    Args:
        rank: Rank of this process, and index of its GPU.
        ranks: Number of ranks.
        store: File of the store for the rendezvous.
        folder: Folder on the disk whose speed is measured.

    Returns:
        ``timed``: sizes with their seconds; ``device``, ``memory_bytes`` and ``multiprocessors`` of
        the GPU; ``context_bytes`` and ``communicator_bytes``: device memory outside of torch's
        allocator, if no other program uses the device.
    """
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    timed = list(time_kernels(device, _seconds_on_gpu, has_bf16=has_bf16))
    context = _bytes_outside_allocator(device)
    communicator = 0
    if ranks > 1:
        file_store = dist.FileStore(store, ranks)
        environment = local_place(rank, ranks)
        with World.join(environment, backend="nccl", timeout_s=120, store=file_store):
            timed += time_links(device, _seconds_on_gpu, ranks=ranks)
            communicator = _bytes_outside_allocator(device) - context
    timed += _time_disk(folder, _WRITTEN // ranks)
    return {
        "timed": timed,
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "context_bytes": context,
        "communicator_bytes": communicator,
    }


def time_kernels(device: torch.device, clock: Clock, *, has_bf16: bool) -> Iterator[Sizes]:
    """Yield the sizes and seconds of products, attention, norms, launches and copies.

    Args:
        device: Device to run on.
        clock: Clock of the device.
        has_bf16: Whether the device computes in bf16; those that do also compute in TF32.
    """
    for precision in PRECISIONS.values():
        dtype = getattr(torch, precision.compute.dtype)
        if dtype is torch.bfloat16 and not has_bf16:
            continue
        yield from _time_products(device, clock, precision.peak, dtype)
        if precision.relaxed_peak != precision.peak and has_bf16:
            previous = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
            try:
                yield from _time_products(device, clock, precision.relaxed_peak, dtype)
            finally:
                torch.set_float32_matmul_precision(previous)
    half = torch.bfloat16 if has_bf16 else torch.float16
    short: dict[str, Any] = {"dtype": half, "device": device}
    yield _time_attention(clock, short)
    x, weight = torch.zeros(_ROWS, _WIDTH, **short), torch.ones(_WIDTH, **short)
    for moved, run in (
        (2 * x.nbytes + weight.nbytes, lambda: rms_norm(x, (_WIDTH,), weight)),
        (2 * x.nbytes, lambda: silu(x)),
        (3 * x.nbytes, lambda: x + x.view_as(x)),
    ):
        yield _time(clock, run, kind="kernel", bytes=moved)
    small = torch.zeros(8, device=device)
    yield _time(clock, partial(small.mul_, 1.0), kind="launch", queued=_QUEUED)
    host = torch.zeros(_COPIED, dtype=torch.uint8, pin_memory=device.type == "cuda")
    copy = torch.zeros(_COPIED, dtype=torch.uint8, device=device)
    yield _time(clock, lambda: copy.copy_(host, non_blocking=True), kind="host", bytes=_COPIED)


def _time_products(
    device: torch.device, clock: Clock, peak: str, dtype: torch.dtype
) -> Iterator[Sizes]:
    for m, n, k in _SHAPES:
        a = torch.zeros(m, k, dtype=dtype, device=device).normal_()
        b = torch.zeros(k, n, dtype=dtype, device=device).normal_()
        yield _time(clock, partial(torch.matmul, a, b), kind="product", peak=peak, m=m, n=n, k=k)


def _time_attention(clock: Clock, short: dict[str, Any]) -> Sizes:
    shape = (1, _HEADS, _POSITIONS, _HEAD_DIM)
    q, k, v = (torch.zeros(shape, **short).normal_().requires_grad_() for _ in range(3))
    gradient = torch.ones(shape, **short)

    def run() -> None:
        scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)

    sizes = {"heads": _HEADS, "positions": _POSITIONS, "head_dim": _HEAD_DIM}
    return _time(clock, run, kind="attention", **sizes)


def time_links(device: torch.device, clock: Clock, *, ranks: int) -> Iterator[Sizes]:
    """Yield the sizes and seconds of collectives of all ranks of this node."""
    small, many = torch.zeros(1, device=device), torch.zeros(_REDUCED // 4, device=device)
    part = torch.zeros(_REDUCED // 4 // ranks, device=device)
    gathered = torch.zeros(part.numel() * ranks, device=device)
    all_reduce: Callable[[Tensor], object] = dist.all_reduce
    for kind, tensor, run in (
        ("all_reduce", small, partial(all_reduce, small)),
        ("all_reduce", many, partial(all_reduce, many)),
        ("all_gather", gathered, partial(all_gather_single, gathered, part)),
    ):
        yield _time(clock, run, kind=kind, bytes=tensor.nbytes, ranks=ranks)


def _time(clock: Clock, run: Callable[[], object], **sizes: Any) -> Sizes:
    return {**sizes, "seconds": clock(run, sizes)}


def _seconds_on_gpu(run: Callable[[], object], sizes: Sizes) -> float:
    """Return the shortest mean time of a call in several rounds, in a graph if it is queued."""
    run()
    torch.cuda.synchronize()
    calls, start = _CALLS, run
    if queued := sizes.get("queued"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(queued):
                run()
        calls, start = queued, graph.replay
    rounds: list[float] = []
    for _ in range(_ROUNDS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(1 if queued else calls):
            start()
        ended.record()
        ended.synchronize()
        rounds.append(began.elapsed_time(ended) * 1e-3 / calls)
    return min(rounds)


def _bytes_outside_allocator(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _time_disk(folder: str, num_bytes: int) -> list[Sizes]:
    """Return the time of writing a file of this rank; empty if the folder can't be written to."""
    content = os.urandom(num_bytes)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.perf_counter()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            return [{"kind": "disk", "bytes": num_bytes, "seconds": time.perf_counter() - began}]
    except OSError:
        return []
