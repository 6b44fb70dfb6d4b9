"""Times ``estimate`` of Llama-3.1-405B and ``plan`` of Qwen3-32B, from only config.json.

Reports wall-clock seconds and CPU seconds of all processes: on two idle cores the wall-clock time
is between half of the CPU time and all of it. The cache is empty.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COMMAND = str(Path(sys.executable).with_name("axonlaunch"))

LLAMA_405B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
QWEN3_32B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
}
_BOTH = ["train.precision=bf16", "data=synthetic_tokens", "--json"]
TASKS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "estimate, 512 ranks": (
        LLAMA_405B,
        [
            *("estimate", "strategy=hybrid", "strategy.data_parallel=fsdp"),
            *("strategy.tensor.degree=8", "strategy.pipeline.degree=8"),
            *("launch.nproc=8", "launch.nnodes=64", "train.activation_checkpointing=full"),
            *("train.global_batch_size=512", "train.micro_batch_size=1"),
            *("data.sequence_length=8192", *_BOTH),
        ],
    ),
    "plan, 1,024 devices": (
        QWEN3_32B,
        [
            *("plan", "--devices", "1024", "hardware=h100_80gb"),
            *("train.global_batch_size=1024", "data.sequence_length=4096", *_BOTH),
        ],
    ),
}


def seconds(model: dict[str, Any], overrides: list[str]) -> tuple[float, float]:
    """Run a command on a model that has no weights; return seconds, and CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        command = [COMMAND, *overrides, "model=hf", f"model.path={folder}"]
        before, began = _children(), time.monotonic()
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "XDG_CACHE_HOME": f"{folder}/cache"},
        )
        if ran.returncode:
            raise SystemExit(f"{' '.join(command)}\n{ran.stderr}")
        return time.monotonic() - began, _children() - before


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print the medians, and the load of the machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, (model, overrides) in TASKS.items():
        runs = [seconds(model, overrides) for _ in range(args.repeats)]
        clock, cpu = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{name:20}  {clock:6.1f} s  {cpu:6.1f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
