"""Memory of rank 0 of a layout, on one device: real buffers and kernels without the other ranks.

Collectives of torch's ``fake`` process group do nothing, so values are garbage, but memory is
right. Three steps run in a separate process. The peak of the second and third is compared with
``axonlaunch estimate`` of the same overrides. Memory of the device outside of the allocator is
compared with ``hardware.context_mib``: it is only the context, because there is no communicator.
Offloaded host memory is compared as torch locks it. For each case that is off, ``gpu-memory`` has
the allocator's snapshot, for https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import table
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from axonlaunch import config as configuration, data
from axonlaunch.comm import Backend, World
from axonlaunch.comm.mesh import local_part
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.data.datasets.dataset import sample_inputs
from axonlaunch.data.datasets.loader import rank_loader
from axonlaunch.engines.build import Source, build_engine
from axonlaunch.models.torch_dtypes import torch_dtype
from axonlaunch.planning.memory.live_peak import CpuPeakMemory
from axonlaunch.planning.tracing import fake_world
from axonlaunch.planning.tracing.shape_only_data import replace_with_synthetic
from axonlaunch.preflight.checks import resolve_anywhere
from axonlaunch.system import gpus
from axonlaunch.training.measuring.peak_memory import DevicePeak, PeakWatch
from axonlaunch.training.process.arithmetic import attention_kernels, configure_arithmetic

MIB = 2**20
SNAPSHOTS = Path("gpu-memory")
BF16, SELECTIVE = "train.precision=bf16", "train.activation_checkpointing=selective"
FULL, COMPILED = "train.activation_checkpointing=full", "train.compile=true"
MODE = "train.activation_checkpointing"
NONE = f"{MODE}=none"
INPUTS = "train.activation_checkpointing=offload"
IN_BACKWARD = ("train.optimizer_in_backward=true", "train.grad_clip=null")
LLAMA_1B = [
    *("model=llama3_8b", "model.hidden_size=2048", "model.intermediate_size=8192"),
    *("model.num_hidden_layers=16", "data.sequence_length=4096", "train.global_batch_size=2"),
    *("train.micro_batch_size=2", NONE),  # the preset of 8B has other values
]
LLAMA_8B = ["model=llama3_8b", "data.sequence_length=8192", "train.global_batch_size=8", BF16]
GPT = [
    *("model=gpt", "model.hidden_size=768", "model.num_hidden_layers=12", "model.vocab_size=50257"),
    *("model.num_attention_heads=12", "model.max_position_embeddings=1024"),
    *("data=synthetic_tokens", "data.sequence_length=1024", "train.global_batch_size=16"),
]

MIXTURE = [
    *("model=moe_debug", "model.hidden_size=1024", "model.moe_intermediate_size=1024"),
    *("model.num_hidden_layers=12", "model.num_attention_heads=16", "data=synthetic_tokens"),
    *("data.sequence_length=2048", "train.global_batch_size=4", "strategy=fsdp", BF16),
]

CASES: dict[str, tuple[int, list[str]]] = {
    "gpt2 fp32": (1, [*GPT, "strategy=single"]),
    "gpt2 bf16": (1, [*GPT, "strategy=single", BF16]),
    "1.2B": (1, [*LLAMA_1B, "strategy=single", BF16]),
    "1.2B selective": (1, [*LLAMA_1B, "strategy=single", BF16, SELECTIVE]),
    "1.2B full": (1, [*LLAMA_1B, "strategy=single", BF16, FULL]),
    "1.2B full, inputs offloaded": (1, [*LLAMA_1B, "strategy=single", BF16, INPUTS]),
    "1.2B updated in backward": (1, [*LLAMA_1B, "strategy=single", BF16, SELECTIVE, *IN_BACKWARD]),
    "1.2B compiled": (1, [*LLAMA_1B, "strategy=single", BF16, COMPILED]),
    "1.2B fsdp 1": (1, [*LLAMA_1B, "strategy=fsdp", BF16]),
    **{f"mixture {mode}": (1, [*MIXTURE, f"{MODE}={mode}"]) for mode in ("none", "full")},
    "1.2B fp32": (
        1,
        [
            *(*LLAMA_1B, "strategy=single", "data.sequence_length=2048"),
            *("train.global_batch_size=1", "train.micro_batch_size=1"),
        ],
    ),
    "8B fsdp 8 full": (8, [*LLAMA_8B, "strategy=fsdp", FULL]),
    "8B fsdp 8 selective": (8, [*LLAMA_8B, "strategy=fsdp", SELECTIVE]),
    "8B fsdp 8 compiled": (8, [*LLAMA_8B, "strategy=fsdp", SELECTIVE, COMPILED]),
    "8B fsdp 8 none": (8, [*LLAMA_8B, "strategy=fsdp", "data.sequence_length=4096", NONE]),
    "8B zero2 8": (8, [*LLAMA_8B, "strategy=zero2", FULL]),
    "8B hsdp 2x4": (8, [*LLAMA_8B, "strategy=hsdp", "strategy.fsdp.replicate=2", FULL]),
    "8B fsdp 2 x tensor 4": (
        8,
        [*LLAMA_8B, "strategy=fsdp", "strategy.tensor.degree=4", "train.global_batch_size=2"],
    ),
    **{
        f"1.2B offload {what}": (
            1,
            [*LLAMA_1B, "strategy=fsdp", BF16, SELECTIVE, f"strategy.fsdp.cpu_offload={what}"],
        )
        for what in ("params", "optimizer_states", "full")
    },
}
QLORA = [
    *(*LLAMA_8B, "strategy=single", FULL, "adapter=lora", "adapter.base=nf4"),
    *("data.sequence_length=4096", "train.global_batch_size=1", "train.micro_batch_size=1"),
]
CASES |= {
    "1.2B masters": (
        1,
        [
            *(*LLAMA_1B, "strategy=fsdp", BF16, SELECTIVE, "train.param_dtype=bf16"),
            "optimizer.master_weights=fp32",
        ],
    ),
    "1.2B states in 8 bits": (
        1,
        [*LLAMA_1B, "strategy=fsdp", BF16, SELECTIVE, "optimizer=adamw_8bit"],
    ),
    "8B adapters on nf4": (1, QLORA),
}
CASES["1.2B fixed segments"] = CASES["1.2B"]
if importlib.util.find_spec("liger_kernel"):
    LIGER = "train.loss_kernel=liger"
    CASES["1.2B, loss of Liger"] = (1, [*LLAMA_1B, "strategy=single", BF16, LIGER])
ALLOCATORS = {"1.2B fixed segments": "expandable_segments:False"}
"""Settings of torch's allocator, if they differ from a run's."""
TINY = [
    *("model=llama_debug", "data=synthetic_tokens", "data.sequence_length=32"),
    *("model.hidden_size=64", "train.global_batch_size=4", "launch.backend=mock"),
]
CASES |= {
    "8B fsdp 4 x context 2": (
        8,
        [
            *(*LLAMA_8B, FULL, "strategy=fsdp", "strategy.context.degree=2"),
            "train.global_batch_size=4",
        ],
    ),
    **{
        f"8B pipeline 4 {schedule}": (
            4,
            [
                *(*LLAMA_8B, FULL, "strategy=pipeline", "strategy.pipeline.degree=4"),
                *(f"strategy.pipeline.schedule={schedule}", "train.micro_batch_size=1"),
            ],
        )
        for schedule in ("1f1b", "interleaved_1f1b")
    },
}
CASES_OF_CPU: dict[str, tuple[int, list[str]]] = {
    "fsdp 4": (4, [*TINY, "strategy=fsdp"]),
    "fsdp 2 x tensor 2": (4, [*TINY, "strategy=fsdp", "strategy.tensor.degree=2"]),
    "fsdp x context 2": (2, [*TINY, "strategy=fsdp", "strategy.context.degree=2"]),
    "mixture of 2": (2, [*TINY, "model=moe_debug", "strategy=fsdp"]),
    "pipeline 2 1f1b": (
        2,
        [*TINY, "strategy=pipeline", "strategy.pipeline.degree=2", "train.micro_batch_size=1"],
    ),
}


def main() -> int:
    """Measure and estimate every case."""
    args = table.arguments(__doc__ or "")
    cases = CASES if args.device == "cuda" else CASES_OF_CPU
    if args.case:
        ranks, overrides = cases[args.case]
        device = torch.device(args.device, 0)
        snapshot = SNAPSHOTS / f"{args.case}.pickle"
        sys.stdout.write(json.dumps(measured(overrides, ranks, device, snapshot)))
        return 0

    # Estimates need no device, so they run while others are measured.
    pool = ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) // 4))
    estimates = {
        name: pool.submit(estimated, name, overrides, ranks, **_allocator(name))
        for name, (ranks, overrides) in cases.items()
        if name.startswith(args.only)
    }

    def case(name: str) -> table.Row:
        asked = [sys.executable, __file__, "--device", args.device, "--case", name]
        ran = table.ended(asked, **_allocator(name))
        if ran.returncode:
            return table.Row(name, problem=table.why(name, ran.stderr))
        estimate = estimates[name].result()
        if isinstance(estimate, str):
            return table.Row(name, problem=estimate)
        row = compared(name, json.loads(ran.stdout), estimate)
        if not row.problem:
            (SNAPSHOTS / f"{name}.pickle").unlink(missing_ok=True)
        return row

    status = table.run([*cases], args.only, case)
    pool.shutdown(cancel_futures=True)
    return status


def measured(
    overrides: list[str], ranks: int, device: torch.device, snapshot: Path
) -> dict[str, int]:
    """Run three steps as rank 0 of some ranks; return bytes, and write a GPU's snapshot."""
    config = resolve_anywhere(
        replace_with_synthetic(configuration.load([*overrides, f"launch.nproc={ranks}"]))
    )
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    used = 0
    if device.type == "cuda":
        first = gpus.devices()[0].uuid
        used = used_bytes(first)
        torch.cuda.set_device(device)
        torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    else:
        device = torch.device("cpu")
    world = World(rank=0, local_rank=0, world_size=ranks, device=device, backend=Backend.MOCK)
    configure_arithmetic(config.train)
    watch: PeakWatch = DevicePeak(device) if device.type == "cuda" else CpuPeakMemory(config)
    try:
        states = _train(config, world, watch)
    finally:
        if device.type == "cuda":
            snapshot.parent.mkdir(exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(snapshot))
    peaks = {"allocated": watch.peak_bytes() or 0}
    if device.type == "cuda":
        peaks["reserved"] = torch.cuda.max_memory_reserved(device)
        peaks["host"] = torch.cuda.host_memory_stats()["allocated_bytes.peak"] + states
        if now := used_bytes(first):
            peaks["context"] = now - used - torch.cuda.memory_reserved(device)
    return peaks


def _train(config: RunConfig, world: World, watch: PeakWatch) -> int:
    """Run three steps; return the bytes of the states that are in host memory."""
    dataset = data.build_dataset(config.data, config.tokenizer)
    layout = Layout.of(config, world_size=world.world_size)
    is_cuda = world.device.type == "cuda"
    loader = rank_loader(config, dataset, layout=layout, rank=0, pin_memory=is_cuda)
    source = Source(storing=watch.storing)
    if layout.pipeline > 1:
        fake_world.use_static_pipeline_shapes()
        fake_world.keep_sent_tensors()
        source = Source(
            storing=watch.storing,
            boundaries=lambda _, stages: _boundaries(config, layout, len(stages), world.device),
        )
    engine = build_engine(config, world, sample=sample_inputs(dataset), source=source)
    for step in range(3):
        with watch.step(engine), attention_kernels(config.train, world.device):
            engine.train_step(loader.batch(step))
    states = map(local_part, engine.optimizer_states())
    return sum(state.nbytes for state in states if state.device.type == "cpu")


def _boundaries(
    config: RunConfig, layout: Layout, stages: int, device: torch.device
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return each stage's inputs and outputs for a llama's micro-batch, which no rank sends."""
    model: Any = config.model
    positions: Any = getattr(config.data, "sequence_length", None)
    shape = (layout.micro_batch_size, positions)
    dtype = torch_dtype(PRECISIONS[config.train.precision].compute)

    def values(width: int) -> torch.Tensor:
        return torch.empty(*shape, width, device=device, dtype=dtype)

    tokens = torch.empty(shape, device=device, dtype=torch.int64)
    return {
        stage: (
            values(model.hidden_size) if stage else tokens,
            values(model.vocab_size if stage == stages - 1 else model.hidden_size),
        )
        for stage in range(stages)
    }


def used_bytes(uuid: str) -> int:
    """Return the used memory of a device by all processes; 0 if its driver does not say.

    The driver lists processes by PIDs of the host, which differ in a container.
    """
    asked = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=memory.used"]
    command = [*asked, "--format=csv,noheader,nounits"]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return int(printed) * MIB if printed.isdigit() else 0


def _allocator(name: str) -> dict[str, str]:
    return {"PYTORCH_ALLOC_CONF": ALLOCATORS[name]} if name in ALLOCATORS else {}


def estimated(
    name: str, overrides: list[str], ranks: int, **environment: str
) -> dict[str, Any] | str:
    """Return the output of ``axonlaunch estimate``, or why it failed."""
    arguments = [*overrides, f"launch.nproc={ranks}", "--json"]
    command = [sys.executable, "-m", "axonlaunch", "estimate", *arguments]
    ran = table.ended(command, **environment)
    if ran.returncode:
        return f"estimate: {table.why(name, ran.stderr)}"
    estimate: dict[str, Any] = json.loads(ran.stdout)
    return estimate


def compared(name: str, peaks: dict[str, int], estimate: dict[str, Any]) -> table.Row:
    """Return a row: allocated and host within 2% and 64 MiB, reserved within 5%; a CPU's 0.1%."""
    host = max((rank["host_bytes"] for rank in estimate.get("ranks", ())), default=0)
    estimate = {**estimate, "host": host}
    pairs = {"allocated": "peak_bytes", "reserved": "reserved_bytes", "context": "context_bytes"}
    pairs |= {"host": "host"} if host else {}
    first = estimate.get("ranks", [estimate])[0]
    if first["peak_bytes"] != estimate["peak_bytes"]:
        # Rank 0 was measured, so the maximum over other ranks does not apply.
        estimate, pairs = first, {"allocated": "peak_bytes"}
    cells: dict[str, str] = {}
    problems = []
    for what, key in pairs.items():
        if what not in peaks:
            continue
        ours, theirs = peaks[what], int(estimate[key])
        off = (theirs - ours) / ours if ours else 0.0
        cells[f"{what}, MiB"] = f"{ours / MIB:,.1f}"
        cells[f"{what}, estimated"] = f"{theirs / MIB:,.1f} ({off:+.1%})"
        slack = {
            "allocated": 0.02 * ours + 64 * MIB,
            "reserved": 0.05 * ours,
            "host": 0.02 * ours + 64 * MIB,  # batches are there, too
        }.get(what)
        if "reserved" not in peaks:
            slack = 0.001 * ours  # some messages without a receiver are freed earlier
        if slack is not None and abs(theirs - ours) > slack:
            problems.append(f"{what} is {off:+.1%} off")
    return table.Row(name, cells, "; ".join(problems))


if __name__ == "__main__":
    sys.exit(main())
