"""Writes folders as runs do: of any length, crashed, or half written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

CONFIG = (
    "name: {name}\nmodel:\n  name: gpt\ndata:\n  name: python_source\ntrain:\n  steps: {steps}\n"
)


def run_folder(
    folder: Path,
    *,
    steps: int = 30,
    name: str | None = None,
    status: str | None = "done",
    ranks: int = 0,
    experts: int = 0,
    loss: Any = None,
    extra_config: str = "",
    counted: str = "tokens",
) -> Path:
    """Write the files of a run.

    Args:
        folder: New folder.
        steps: Number of logged steps.
        name: Name of the run; None uses the folder's.
        status: Final status; None writes none.
        ranks: Number of ranks with measured times.
        experts: Number of blocks with experts.
        loss: Function from step to loss; None uses a falling loss.
        extra_config: Additional lines of YAML.
        counted: Unit of the data: tokens, images or samples.
    """
    folder.mkdir(parents=True)
    (folder / "logs").mkdir()
    text = CONFIG.format(name=json.dumps(name or folder.name), steps=steps)
    (folder / "config.yaml").write_text(text + extra_config)
    loss = loss or (lambda step: 4 * math.exp(-step / steps) + 0.25)
    loads = {str(block): 1 + 1.5 * (block + 1) / experts for block in range(experts)}
    lines = [
        {
            "step": step,
            "loss": loss(step),
            "lr": 0.001 * step,
            "grad_norm": 1.0,
            counted: 100,
            f"{counted}_per_s": 1000.0,
            "step_s": 0.1,
            "peak_memory_bytes": 2**20,
            **({"expert_load": 2.5, "expert_loads": loads} if experts else {}),
        }
        for step in range(1, steps + 1)
    ]
    write_lines(folder / "metrics.jsonl", [*lines, {"step": steps, "eval_loss": 1.5}])
    times: list[dict[str, Any]] = [
        {
            "time": 1001 + step / 10,
            "event": "rank_times",
            "step": step,
            "hosts": [f"node-{rank // 8}" for rank in range(ranks)],
            "data": [0.0] * ranks,
            "compute": [0.9 if rank == ranks - 1 else 0.5 for rank in range(ranks)],
            "wait": [0.1] * ranks,
            "starved": [0.0] * ranks,
        }
        for step in (range(10, steps + 1, 10) if ranks else ())
    ]
    end = 1001 + steps / 10
    about = {"step": 0, "layout": f"ddp {max(ranks, 1)}", "world_size": max(ranks, 1)}
    events: list[dict[str, Any]] = [
        {"time": 1000.0, "event": "launched", "host": "node-0", "commit": "a" * 40},
        {"time": 1001.0, "event": "started", **about, "parameters": 10, "counted": counted},
        *times,
        {"time": end, "event": "saved", "step": steps, "seconds": 0.5, "stalled_s": 0.25},
    ]
    if status is not None:
        events.append({"time": end + 1, "event": "ended", "status": status, "step": steps})
        summary = {"status": status, "steps": steps, "measured_peak_bytes": 2**21}
        (folder / "summary.json").write_text(json.dumps(summary))
    write_lines(folder / "events.jsonl", events)
    return folder


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
