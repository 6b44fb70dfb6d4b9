"""Whether everything trains on this node's GPU: estimates beside it, then every kind of run.

A run of fp32 has the losses of the same run on the CPU; the others end with a finite one.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import table

STEPS = 20
SMALL = [
    *("data=synthetic_tokens", "data.sequence_length=64", "train.global_batch_size=8"),
    *(f"train.steps={STEPS}", "train.log_every=1", "train.eval_batches=2"),
    *("sample.max_new_tokens=0", "launch.nproc=1"),
]
GPT, LLAMA = ["model=gpt"], ["model=llama_debug"]
BF16, ESTIMATE = "train.precision=bf16", ["model=llama_debug", "launch.nproc=8"]
COMMANDS = {
    "doctor": ["doctor", "--json"],
    "estimate": ["estimate", *ESTIMATE, "strategy=fsdp", "hardware=h100_80gb", "--json"],
    "plan": [
        *("plan", "--devices", "2", "model=llama_debug", "hardware=h100_80gb", "--json"),
        *("strategy.data_parallel=ddp", "strategy.tensor.degree=1", "strategy.pipeline.degree=1"),
    ],
    "dry run": ["train", "--dry-run", *SMALL, *GPT],
}
RUNS = {
    "gpt fp32": [*GPT, "strategy=single"],
    "llama fp32": [*LLAMA, "strategy=single"],
    "llama fp16": [*LLAMA, "strategy=single", "train.precision=fp16"],
    "llama tf32": [*LLAMA, "strategy=single", "train.matmul_precision=high"],
    **{f"llama bf16 {s}": [*LLAMA, f"strategy={s}", BF16] for s in ("single", "ddp", "zero1")},
    **{
        f"llama bf16 fsdp, offload {what}": [
            *(*LLAMA, BF16, "strategy=fsdp", f"strategy.fsdp.cpu_offload={what}")
        ]
        for what in ("none", "params", "optimizer_states", "full")
    },
    "compiled": [*LLAMA, BF16, "strategy=fsdp", "train.compile=true"],
    "full recomputation": [*LLAMA, BF16, "train.activation_checkpointing=full"],
    "selective recomputation": [*LLAMA, BF16, "train.activation_checkpointing=selective"],
    "deterministic": [*LLAMA, BF16, "train.deterministic=true"],
    "saved in the background": [*LLAMA, "checkpoint.every=5", "checkpoint.async_save=true"],
    "profiled": [*LLAMA, BF16, "train.profile={steps: [10, 12], memory: true}"],
}
ON_CPU = {"commands": ("estimate",), "runs": ("gpt fp32",)}


def main() -> int:
    """Run every command and every kind of run."""
    args = table.arguments(__doc__ or "")
    on_cuda = args.device == "cuda"
    commands = {n: c for n, c in COMMANDS.items() if on_cuda or n in ON_CPU["commands"]}
    runs = {n: r for n, r in RUNS.items() if on_cuda or n in ON_CPU["runs"]}
    with tempfile.TemporaryDirectory() as folder:

        def case(name: str) -> table.Row:
            if name in commands:
                return command(name, commands[name], Path(folder))
            return trained(name, runs[name], Path(folder), on_cuda=on_cuda)

        return table.run([*commands, *runs], args.only, case)


def command(name: str, overrides: list[str], folder: Path) -> table.Row:
    """Run a command that starts no rank, with the devices seen and with them hidden."""
    problems = []
    for devices in (None, ""):
        environment = dict(os.environ)
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        ran = axonlaunch(overrides, folder, environment)
        if ran.returncode:
            problems.append(f"status {ran.returncode}: {table.last_line(ran.stderr)}")
    return table.Row(name, problem="; ".join(problems))


def trained(name: str, overrides: list[str], folder: Path, *, on_cuda: bool) -> table.Row:
    """Train, and where the arithmetic is the CPU's hold the losses beside those of a CPU."""
    losses = {}
    is_fp32 = not any("precision=" in word for word in overrides)
    devices = ("nccl", "gloo") if is_fp32 else ("nccl",)
    for backend in devices if on_cuda else ("gloo",):
        run = f"{name} {backend}".replace(" ", "-").replace(",", "")
        arguments = [
            "train",
            *SMALL,
            *overrides,
            f"launch.backend={backend}",
            f"name={run}",
            "--json",
        ]
        ran = axonlaunch(arguments, folder, dict(os.environ))
        if ran.returncode:
            return table.Row(
                name, problem=f"status {ran.returncode}: {table.last_line(ran.stderr)}"
            )
        lines = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
        losses[backend] = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    ours = next(iter(losses.values()))
    cells = {"first loss": f"{ours[0]:.4f}", "last loss": f"{ours[-1]:.4f}"}
    if len(ours) != STEPS or not all(map(math.isfinite, ours)):
        return table.Row(name, cells, f"{len(ours)} losses, the last {ours[-1]}")
    if len(losses) == 2:
        off = max(abs(a - b) / abs(b) for a, b in zip(*losses.values(), strict=True))
        cells["off the CPU's"] = f"{off:.1e}"
        if off > 1e-4:
            return table.Row(name, cells, f"{off:.1e} off the CPU's losses, 1e-4 is allowed")
    return table.Row(name, cells)


def axonlaunch(
    overrides: list[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "axonlaunch", *overrides],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=table.seconds_left(),
    )


if __name__ == "__main__":
    sys.exit(main())
