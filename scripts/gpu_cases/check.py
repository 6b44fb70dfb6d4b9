"""Checks that everything trains on this node's GPU: estimates, then every kind of run.

A run in fp32 has the losses of the same run on the CPU; the others end with a finite one. Layouts
of several ranks compute the same as one process on the CPU, with ranks as threads that share the
GPU; with compute-sanitizer on PATH it checks two of them. Two runs are stopped, by Ctrl-C and by
SIGTERM, their checkpoints are checked, and they resume; only the rank of a run has initialized
CUDA.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import table
import torch
import torch.distributed as dist

from axonlaunch import config as configuration
from axonlaunch.comm import World
from axonlaunch.comm.connection.rendezvous import RankEnvironment
from axonlaunch.preflight.checks import resolve
from axonlaunch.verification.comparison.compare import on_mock
from axonlaunch.verification.comparison.comparison_config import harder_config
from axonlaunch.verification.references.comparison_plan import ComparisonPlan

STEPS = 20
SMALL = [
    *("data=synthetic_tokens", "data.sequence_length=64", "train.global_batch_size=8"),
    *(f"train.steps={STEPS}", "train.log_every=1", "train.eval_batches=2"),
    "launch.nproc=1",
]
GPT, LLAMA = ["model=gpt"], ["model=llama_debug"]
MOE = ["model=moe_debug", "strategy=fsdp"]
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
    "mixture bf16": [*MOE, BF16],
    "compiled": [*LLAMA, BF16, "strategy=fsdp", "train.compile=true"],
    "full recomputation": [*LLAMA, BF16, "train.activation_checkpointing=full"],
    "selective recomputation": [*LLAMA, BF16, "train.activation_checkpointing=selective"],
    **{
        f"{name} recomputation, inputs offloaded": [
            *(*LLAMA, BF16, f"train.activation_checkpointing={mode}")
        ]
        for name, mode in (("full", "offload"), ("selective", "selective_offload"))
    },
    **{
        f"updated in backward, {strategy}": [
            *(*LLAMA, BF16, f"strategy={strategy}", "train.optimizer_in_backward=true"),
            "train.grad_clip=null",
        ]
        for strategy in ("single", "fsdp")
    },
    "updated on the host in backward": [
        *(*LLAMA, BF16, "strategy=fsdp", "strategy.fsdp.cpu_offload=full"),
        *("train.optimizer_in_backward=true", "train.grad_clip=null"),
    ],
    "adapters on nf4": [
        *(*LLAMA, BF16, "strategy=fsdp", "adapter=lora", "adapter.base=nf4"),
        *("model.hidden_size=128", "model.intermediate_size=256"),
    ],
    "masters": [
        *(*LLAMA, BF16, "strategy=fsdp", "train.param_dtype=bf16"),
        "optimizer.master_weights=fp32",
    ],
    "states in 8 bits": [*LLAMA, BF16, "strategy=fsdp", "optimizer=adamw_8bit"],
    "states in bf16": [*LLAMA, BF16, "strategy=fsdp", "optimizer.state_dtype=bf16"],
    **{
        f"products in {products}": [
            *(*LLAMA, BF16, "train.compile=true", f"train.matmul_dtype={products}"),
            *("model.hidden_size=128", "model.intermediate_size=256"),
        ]
        for products in ("fp8_tensorwise", "fp8_rowwise")
    },
    "deterministic": [*LLAMA, BF16, "train.deterministic=true"],
    "saved in the background": [*LLAMA, "checkpoint.every=5", "checkpoint.async_save=true"],
    "profiled": [*LLAMA, BF16, "train.profile={steps: [10, 12], memory: true}"],
}
if importlib.util.find_spec("liger_kernel"):
    LIGER = "train.loss_kernel=liger"
    RUNS["gpt fp32, loss of Liger"] = [*GPT, "strategy=single", LIGER]
    RUNS["llama bf16 fsdp, loss of Liger"] = [*LLAMA, BF16, "strategy=fsdp", LIGER]
LAYOUTS = {
    **{name: [f"strategy={name}", "launch.nproc=2"] for name in ("ddp", "zero1", "zero2", "fsdp")},
    "hsdp": ["strategy=hsdp", "strategy.fsdp.replicate=2", "launch.nproc=4"],
    "tensor": ["strategy=tensor", "launch.nproc=2"],
    "tensor, sequences": [
        *("strategy=tensor", "strategy.tensor.sequence_parallel=true", "launch.nproc=2")
    ],
    **{
        schedule: ["strategy=pipeline", f"strategy.pipeline.schedule={schedule}", "launch.nproc=2"]
        for schedule in ("1f1b", "interleaved_1f1b", "zbv_zero_bubble")
    },
    "hybrid": ["strategy=hybrid", "launch.nproc=8"],
    "context": ["strategy=fsdp", "strategy.context.degree=2", "launch.nproc=2"],
    **{
        f"experts {name}": [*MOE, "strategy.expert.degree=2", "launch.nproc=2", *chosen]
        for name, chosen in (("fp32", []), ("bf16", [BF16]))
    },
    "context bf16": ["strategy=fsdp", "strategy.context.degree=2", "launch.nproc=2", BF16],
}
VERIFIED = {f"verified {name}": layout for name, layout in LAYOUTS.items()}
LOOKED_AT = {f"memory checked {name}": LAYOUTS[name] for name in ("fsdp", "context")}
"""Layouts checked by compute-sanitizer."""
RACING = [*LLAMA, BF16, "strategy=fsdp", "strategy.fsdp.cpu_offload=full"]
STOPPED = {
    "interrupted and resumed": signal.SIGINT,
    "terminated and resumed": signal.SIGTERM,  # as a scheduler does
}
OTHERS = ("one device a task", "same bits when launches wait", *STOPPED)
RESUMED = [
    *(*LLAMA, "checkpoint.every=5", "checkpoint.async_save=true", "estimate.background=false"),
]
"""A run ends when it has saved, and does not wait for an estimate."""
ON_CPU = ("estimate", "gpt fp32", "profiled", "verified fsdp", *LOOKED_AT, *OTHERS)
READ = {"reserved_bytes", "active_bytes", "alloc_retries"}
"""Columns of a GPU in any logged step; columns of NVML and of the device's peak are optional."""
OFF = {"fp32": 1e-4, "bf16": 2e-2}
"""Tolerance that passes, if larger than verify's, which is for two runs on a CPU."""
EXACT = ("rate", "skip")
"""Values that no device computes."""


def main() -> int:
    """Run every command and every kind of run."""
    args = table.arguments(__doc__ or "")
    on_cuda = args.device == "cuda"
    if args.case:
        return _in_this_process(args.case, args.device)
    names = [*COMMANDS, *RUNS, *VERIFIED, *LOOKED_AT, *OTHERS]
    sanitizer = shutil.which("compute-sanitizer")
    if not on_cuda:
        names = [name for name in names if name in ON_CPU]
    elif sanitizer is None:
        names = [name for name in names if name not in LOOKED_AT]
        sys.stdout.write("compute-sanitizer is not on PATH: nothing is looked at by it\n")
    with tempfile.TemporaryDirectory() as folder:

        def case(name: str) -> table.Row:
            if name in COMMANDS:
                return command(name, COMMANDS[name], Path(folder))
            if name in VERIFIED:
                return verified(name, VERIFIED[name], args.device, Path(folder))
            if name in LOOKED_AT:
                looks = [sanitizer, "--error-exitcode", "3"] if on_cuda and sanitizer else []
                return process(name, [*looks, sys.executable, __file__], args.device)
            if name == "one device a task":
                first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
                asked = [sys.executable, __file__]
                return process(name, asked, args.device, CUDA_VISIBLE_DEVICES=first)
            if name in STOPPED:
                return stopped(name, STOPPED[name], Path(folder), on_cuda=on_cuda)
            if name in OTHERS:
                return same_bits(name, Path(folder), on_cuda=on_cuda)
            row = trained(name, RUNS[name], Path(folder), on_cuda=on_cuda)
            is_profiled = name == "profiled" and not row.problem
            return profiled(row, Path(folder), on_cuda=on_cuda) if is_profiled else row

        return table.run(names, args.only, case, at_once=max(1, (os.cpu_count() or 1) // 4))


def command(name: str, overrides: list[str], folder: Path) -> table.Row:
    """Run a command that starts no rank, with the devices visible and hidden."""
    problems = []
    for hidden in ({}, {"CUDA_VISIBLE_DEVICES": ""}):
        ran = axonlaunch(overrides, folder, **hidden)
        if ran.returncode:
            problems.append(f"status {ran.returncode}: {table.why(name, ran.stderr)}")
    return table.Row(name, problem="; ".join(problems))


def trained(name: str, overrides: list[str], folder: Path, *, on_cuda: bool) -> table.Row:
    """Train, and in fp32 compare the losses with those of a CPU, without kernels of Triton."""
    losses = {}
    is_fp32 = not any("precision=" in word for word in overrides)
    devices = ("nccl", "gloo") if is_fp32 else ("nccl",)
    for backend in devices if on_cuda else ("gloo",):
        chosen = [*overrides, f"launch.backend={backend}"]
        if backend == "gloo":
            chosen = [word for word in chosen if not word.startswith("train.loss_kernel=")]
        found = losses_of(f"{name} {backend}", chosen, folder)
        if isinstance(found, str):
            return table.Row(name, problem=found)
        losses[backend] = found
    ours = next(iter(losses.values()))
    cells = {"first loss": f"{ours[0]:.4f}", "last loss": f"{ours[-1]:.4f}"}
    if len(ours) != STEPS or not all(map(math.isfinite, ours)):
        return table.Row(name, cells, f"{len(ours)} losses, the last {ours[-1]}")
    if len(losses) == 2:
        off = max(abs(a - b) / abs(b) for a, b in zip(*losses.values(), strict=True))
        cells["off the CPU's"] = f"{off:.1e}"
        if off > OFF["fp32"]:
            return table.Row(name, cells, f"{off:.1e} off the CPU's losses, 1e-4 is allowed")
    return table.Row(name, cells)


def profiled(row: table.Row, folder: Path, *, on_cuda: bool) -> table.Row:
    """Add device values of a run's profile and logged steps to its row."""
    [run] = (folder / "runs").glob("profiled-*")
    ran = axonlaunch(["profile", str(run), "--json"], folder)
    if ran.returncode:
        return replace(row, problem=f"profile: {table.why(row.name, ran.stderr)}")
    [rank] = json.loads(ran.stdout)["ranks"]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    logged = set().union(*map(json.loads, lines))  # the last line is of the evaluation
    besides = ("mfu", "power_w", "utilization", "temperature_c")
    cells = {
        "products": f"{rank['parts']['matrix products'] / rank['step_s']:.0%}",
        "idle": f"{rank['parts']['idle'] / rank['step_s']:.0%}",
        "logged": ", ".join(name for name in besides if name in logged),
    }
    files = ["merged.json.gz", *(["rank_0.memory.pickle"] if on_cuda else [])]
    missing = [name for name in files if not (run / "profile" / name).exists()]
    missing += sorted(READ - logged) if on_cuda else []
    if not rank["parts"]["matrix products"]:
        missing.append("matrix products")
    problem = f"there is no {', '.join(missing)}" if missing else ""
    return replace(row, cells=row.cells | cells, problem=problem)


def same_bits(name: str, folder: Path, *, on_cuda: bool) -> table.Row:
    """Train twice, once with blocking kernels: races between streams would change losses."""
    losses = []
    for waits in "01":
        overrides = [*RACING, "train.deterministic=true"]
        overrides.append(f"launch.backend={'nccl' if on_cuda else 'gloo'}")
        found = losses_of(f"{name} {waits}", overrides, folder, CUDA_LAUNCH_BLOCKING=waits)
        if isinstance(found, str):
            return table.Row(name, problem=found)
        losses.append(found)
    cells = {"first loss": f"{losses[0][0]:.4f}", "last loss": f"{losses[0][-1]:.4f}"}
    differ = [step for step, (a, b) in enumerate(zip(*losses, strict=True), 1) if a != b]
    problem = f"losses differ from step {differ[0]}" if differ else ""
    return table.Row(name, cells, problem)


def stopped(name: str, number: signal.Signals, folder: Path, *, on_cuda: bool) -> table.Row:
    """Stop a run by a signal, check its checkpoints, then resume it and generate text."""
    small = [word for word in SMALL if not word.startswith(("train.steps=", "sample."))]
    backend = f"launch.backend={'nccl' if on_cuda else 'gloo'}"
    run_name = name.partition(" ")[0]
    run = ["train", *small, *RESUMED, backend, f"name={run_name}"]
    metrics = folder / "runs" / run_name / "metrics.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "axonlaunch", *run, "train.steps=100000"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and table.seconds_left() and last_step(metrics) < 5:
        time.sleep(0.1)
    contexts = contexts_of(process.pid)
    process.send_signal(number)
    try:
        _, errors = process.communicate(timeout=min(60.0, table.seconds_left()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()  # its ranks end with it, and no longer write into the folder
        if not table.seconds_left():
            raise  # the part's time is over
        return table.Row(name, problem=f"it did not end after {number.name}")
    stopped_at = last_step(metrics)
    cells = {"contexts": str(len(contexts)), "stopped at": str(stopped_at)}
    if process.returncode != 130:
        problem = f"status {process.returncode} after {number.name}: {table.why(name, errors)}"
        return table.Row(name, cells, problem)
    steps = stopped_at + 5
    for command in (
        ["checkpoint", "check", f"runs/{run_name}"],
        [*run, f"train.steps={steps}", "checkpoint.resume=auto"],
    ):
        ran = axonlaunch(command, folder)
        if ran.returncode:
            problem = f"{command[0]}: status {ran.returncode}: {table.why(name, ran.stderr)}"
            return table.Row(name, cells, problem)
    problems = ["its log does not say that it resumed"] if "resumed from" not in ran.stdout else []
    if (last := last_step(metrics)) != steps:
        problems.append(f"it resumed after step {stopped_at} and ended at {last}, not {steps}")
    if len(contexts) != on_cuda:
        problems.append(f"{len(contexts)} processes of one rank initialized CUDA")
    return table.Row(name, cells, "; ".join(problems))


def last_step(metrics: Path) -> int:
    """Return the last step that a run logged; 0 before the first."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return max((int(json.loads(line).get("step", 0)) for line in lines), default=0)


def contexts_of(root: int) -> list[int]:
    """Return the processes that initialized CUDA, among a process and all its descendants."""
    return table.computing(lambda pid: root in _ancestors(pid))


def _ancestors(pid: int) -> list[int]:
    found = []
    while pid:
        found.append(pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # just ended
            break
        pid = int(stat.rpartition(")")[2].split()[1])
    return found


def losses_of(
    name: str, overrides: list[str], folder: Path, **environment: str
) -> list[float] | str:
    """Train; return the loss of each step, or an error message."""
    run = name.replace(" ", "-").replace(",", "")
    ran = axonlaunch(
        ["train", *SMALL, *overrides, f"name={run}", "--json"],
        folder,
        **environment,
    )
    if ran.returncode:
        return f"status {ran.returncode}: {table.why(name, ran.stderr)}"
    lines = map(json.loads, (folder / "runs" / run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def verified(name: str, layout: list[str], device: str, folder: Path) -> table.Row:
    """Compare a layout, with ranks as threads on one device, with a single process on the CPU."""
    asked = ["verify", *layout, f"launch.device={device}", "--json"]
    ran = axonlaunch(asked, folder)
    try:
        result = json.loads(ran.stdout)
    except ValueError:
        return table.Row(name, problem=f"status {ran.returncode}: {table.why(name, ran.stderr)}")
    row = judged(name, result, OFF["bf16" if BF16 in layout else "fp32"])
    if row.problem:
        table.why(name, ran.stderr + ran.stdout)
    return row


def judged(name: str, result: dict[str, Any], allowed: float) -> table.Row:
    """Return the row of a verify result; values that are not compared do not pass."""
    if result["failure"] is not None:
        return table.Row(name, problem=result["failure"])
    off = result["max_differences"]
    cells = {f"{kind} off": f"{off[kind]:.1e}" for kind in ("loss", "gradient", "parameter")}
    if result["passed"]:
        return table.Row(name, cells)
    if result["reason"]:
        return table.Row(name, cells, result["reason"])
    passing = {
        kind: own if kind in EXACT else max(own, allowed)
        for kind, own in result["tolerances"].items()
    }
    wrong = [f"{kind} is {off[kind]:.1e} off" for kind in passing if not off[kind] <= passing[kind]]
    return table.Row(name, cells, "; ".join(wrong))


def process(name: str, command: list[str], device: str, **environment: str) -> table.Row:
    """Run a case in a process that starts no other."""
    ran = table.ended([*command, "--device", device, "--case", name], **environment)
    problem = f"status {ran.returncode}: {table.why(name, ran.stdout + ran.stderr)}"
    return table.Row(name, problem=problem if ran.returncode else "")


def _in_this_process(name: str, device: str) -> int:
    if name == "one device a task":
        return _third_of_eight(device)
    overrides = [*LOOKED_AT[name], f"launch.device={device}", "launch.backend=mock"]
    plan = ComparisonPlan(steps=1)
    result = on_mock(harder_config(resolve(configuration.load(overrides)), plan), plan)
    row = judged(name, asdict(result), OFF["fp32"])
    sys.stdout.write(f"{row.problem}\n")
    return int(bool(row.problem))


def _third_of_eight(device: str) -> int:
    """Join as the third task of a node whose scheduler shows each task one device."""
    place = RankEnvironment(
        local_rank=3, local_world_size=8, master_addr=socket.gethostname(), is_single=False
    )
    with World.join(place, store=dist.HashStore()) as world:
        ours = torch.ones(1, device=world.device)
        dist.all_reduce(ours)
        sys.stdout.write(f"{world.backend} on {world.device}\n")
    return int((world.device.type, float(ours)) != (device, 1.0))


def axonlaunch(
    overrides: list[str], folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return table.ended([sys.executable, "-m", "axonlaunch", *overrides], folder, **environment)


if __name__ == "__main__":
    sys.exit(main())
