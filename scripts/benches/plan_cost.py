"""Measures CPU time and memory of ``axonlaunch plan``, and prints the first layouts.

The cases are models and numbers of devices that are trained in practice, and a small and a large
model on 8 to 16,384 devices. The cache is empty. Memory is the highest sum of the proportional set
sizes of all processes of the command, read once a second.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COMMAND = str(Path(sys.executable).with_name("axonlaunch"))
COMMON = ["train.precision=bf16", "data=synthetic_tokens", "hardware=h100_80gb", "--json"]
QWEN3_06B = [
    *("model=llama_debug", "model.hidden_size=1024", "model.num_hidden_layers=28"),
    *("model.num_attention_heads=16", "model.num_key_value_heads=8", "model.vocab_size=151936"),
    *("model.intermediate_size=3072", "model.tie_word_embeddings=true"),
    "model.max_position_embeddings=4096",
]
"""Sizes of Qwen3 0.6B, except that its heads are twice as wide."""
SCALES = (8, 128, 2_048, 16_384)


def case(model: list[str], *, devices: int, length: int, batch: int) -> list[str]:
    """Return the arguments of ``plan`` for a model with ``batch`` samples of ``length`` tokens."""
    sizes = [f"data.sequence_length={length}", f"train.global_batch_size={batch}"]
    return ["plan", "--devices", str(devices), *model, *sizes, *COMMON]


LARGE = ["model=llama3_70b"]
LONG = [*LARGE, "model.max_position_embeddings=131072"]
MIXTURE = ["model=moe_30b_a3b"]
CASES = {
    "0.6b-1": case(QWEN3_06B, devices=1, length=4096, batch=64),
    "8b-8": case(["model=llama3_8b"], devices=8, length=8192, batch=128),
    "70b-64": case(LARGE, devices=64, length=8192, batch=512),
    "70b-64-batch-128": case(LARGE, devices=64, length=8192, batch=128),
    "70b-64-131k": case(LONG, devices=64, length=131072, batch=64),
    "405b-1024": case(["model=llama3_405b"], devices=1024, length=8192, batch=2048),
    "30b-mixture-8": case(MIXTURE, devices=8, length=4096, batch=1024),
    "30b-mixture-64": case(MIXTURE, devices=64, length=4096, batch=1024),
    **{f"0.6b-at-{n}": case(QWEN3_06B, devices=n, length=4096, batch=16_384) for n in SCALES},
    **{f"70b-at-{n}": case(LARGE, devices=n, length=8192, batch=16_384) for n in SCALES},
}


def run(arguments: list[str]) -> tuple[float, float, float, dict[str, Any] | str]:
    """Run a command; return seconds, CPU seconds, peak bytes, and its JSON or its error."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        before, began = _cpu_seconds(), time.monotonic()
        with (Path(folder) / "stdout").open("w+") as out, (Path(folder) / "stderr").open("w+") as e:
            command = subprocess.Popen(
                [COMMAND, *arguments], stdout=out, stderr=e, env=environment, text=True
            )
            peak = 0
            while command.poll() is None:
                peak = max(peak, _memory_of(folder))
                time.sleep(1)
            elapsed = time.monotonic() - began
            for file in (out, e):
                file.seek(0)
            result = e.read() if command.returncode else json.loads(out.read())
        return elapsed, _cpu_seconds() - before, peak, result


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _memory_of(mark: str) -> int:
    """Return the proportional set sizes of all processes with this text in their environment."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                lines = (folder / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except OSError:  # it ended, or belongs to someone else
            continue
    return total * 1024


def main() -> None:
    """Print a line for each case, and its first three layouts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*CASES], default=[*CASES], metavar="CASE")
    for name in parser.parse_args().only:
        elapsed, cpu, peak, result = run(CASES[name])
        print(f"\n{name}: {elapsed:.0f} s, {cpu:.0f} CPU s, {peak / 2**20:.0f} MiB", flush=True)
        if isinstance(result, str):
            print(result.strip())
            continue
        print(f"{result['searched']:,} layouts searched")
        for planned in result["candidates"][:3]:
            parts = ", ".join(f"{k} {v:.2f}" for k, v in planned["breakdown"].items())
            print(f"{planned['step_s']:8.2f} s  MFU {planned['mfu']:.1%}  fits: {planned['fits']}")
            print(f"    {' '.join(planned['overrides'])}\n    {parts}", flush=True)


if __name__ == "__main__":
    main()
