"""Measures transfers between device and host, compared with the time of the link itself.

Offloaded parameters and states are transferred in every step: a profile gives the bytes in each
direction, and the link was timed with the same number of bytes at once. A save in the background
blocks for one copy to the host; the first save also locks that memory. On a CPU nothing is
transferred.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import table
import torch
from check import axonlaunch
from memory import BF16, LLAMA_1B, SELECTIVE
from torch.profiler import profile

from axonlaunch.diagnostics.doctor.gpus import link_report

GIB = 2**30
SAVED = [
    *("train.steps=12", "checkpoint.every=4", "checkpoint.keep_last=1", "train.log_every=1"),
    *("checkpoint.async_save=true", "train.eval_batches=0"),
    *("estimate.background=false", "launch.nproc=1", "data=synthetic_tokens"),
]
OFFLOADED = {
    f"offload {what}": ["strategy=fsdp", f"strategy.fsdp.cpu_offload={what}"]
    for what in ("none", "params", "optimizer_states", "full")
}
SAVES = "saved in the background"
MODEL = [*LLAMA_1B, BF16, SELECTIVE]
MODEL_OF_CPU = [
    *("model=llama_debug", "data=synthetic_tokens", "data.sequence_length=32", BF16),
    *("model.hidden_size=64", "train.global_batch_size=4"),
]


def passing(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return the seconds of a step and its transfers: GiB each way, seconds of the link."""
    step()
    times = []
    for _ in range(3):
        _wait(device)
        began = time.perf_counter()
        step()
        _wait(device)
        times.append(time.perf_counter() - began)
    with profile() as profiled:
        step()
        _wait(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    there, back = bytes_each_way(events)
    found = {"step": statistics.median(times), "there": there / GIB, "back": back / GIB}
    return {**found, "floor": floor(there, back, _links(device))}


def bytes_each_way(events: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the bytes that a trace has copied to the device and to the host."""
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    there, back = (
        sum(int(copy["args"].get("bytes", 0)) for copy in copies if kind in copy["name"])
        for kind in ("HtoD", "DtoH")
    )
    return there, back


def floor(there: int, back: int, links: dict[str, float]) -> float:
    """Return the seconds in which a link that works both ways at once moves some bytes.

    Args:
        there: Bytes to the device.
        back: Bytes to the host.
        links: GB/s by source; empty on a CPU.
    """
    return max((there / links["host"], back / links["device"])) / 1e9 if links else 0.0


def of_offload(name: str, found: dict[str, float], *, on_cuda: bool) -> table.Row:
    """Return the row of an offloaded step; on a GPU there must be transfers."""
    cells = {
        "step, ms": f"{1e3 * found['step']:.1f}",
        "to the device, GiB": f"{found['there']:.2f}",
        "to the host, GiB": f"{found['back']:.2f}",
        "the link alone, ms": f"{1e3 * found['floor']:.1f}",
    }
    passes = found["there"] + found["back"] > 0.1
    expected = on_cuda and not name.endswith("none")
    problem = "nothing passes between host and device" if expected and not passes else ""
    return table.Row(name, cells, problem)


def saved(overrides: list[str], device: torch.device) -> dict[str, Any]:
    """Train with saves in the background; return their reports, and the link's seconds.

    Raises:
        RuntimeError: The run failed.
    """
    backend = f"launch.backend={'nccl' if device.type == 'cuda' else 'gloo'}"
    with tempfile.TemporaryDirectory() as folder:
        run = ["train", *overrides, *SAVED, backend, "name=saves"]
        ran = axonlaunch(run, Path(folder))
        if ran.returncode:
            raise RuntimeError(table.why(SAVES, ran.stderr))
        run_dir = Path(folder) / "runs" / "saves"
        lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
        saves = [line for line in lines if line["event"] == "saved"]
        files = (run_dir / "checkpoints").rglob("*")
        size = sum(file.stat().st_size for file in files if file.is_file())
    return {"saves": saves, "floor": floor(0, size, _links(device))}


def of_saves(saves: list[dict[str, Any]], floor: float) -> table.Row:
    """Return the row of a run's saves; later ones copy to existing memory."""
    stalls = [float(save["stalled_s"]) for save in saves]
    if len(stalls) < 3:
        return table.Row(SAVES, problem=f"{len(stalls)} checkpoints were written, not 3")
    cells = {
        "first stall, ms": f"{1e3 * stalls[0]:.1f}",
        "stall, ms": f"{1e3 * max(stalls[1:]):.1f}",
        "save, ms": f"{1e3 * max(float(save['seconds']) for save in saves):.1f}",
        "the link alone, ms": f"{1e3 * floor:.1f}",
    }
    return table.Row(SAVES, cells)


def _links(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    rates = {link["source"]: link["gb_s"] for link in link_report()["links"][:2]}
    return {"host": rates["host"], "device": rates[str(device)]}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
