"""Tokens/s and MFU of axonlaunch, a hand-written loop and one like torchtitan's, interleaved.

Each contestant trains the same model on the same tokens on one device, with the same arithmetic:
products in bf16 of copies of fp32 parameters, gradients summed and AdamW's update in fp32.

- axonlaunch runs as in a training run, with manual garbage collection.
- ``by hand`` uses fully_shard of each block and of the rest, and its mixed-precision policy, even
  if one rank has all parameters.
- ``as torchtitan`` uses torchtitan's units (embedding, blocks, norm with head), compiled blocks and
  loss if the case compiles, and manual garbage collection.

All use the attention kernels that a run chooses. Only one fits on the device, so they take turns
twice, the second time in the opposite order. The first steps of each turn are dropped, and the
median of the others counts. Only the first rank exists: collectives of torch's ``fake`` process
group do nothing, so the speed of 8 ranks is that of their kernels without communication. The table
also has the difference between rounds and the host's time to issue a step.

One step of axonlaunch is profiled after all were timed: its number of kernels, their work, and the
time in which the device is idle. ``gpu-logs`` keeps the trace of a case that is too slow. Then the
experts of a rank are compared with torchtitan's way (``mixture.py``), and steps with offload and
saves in the background with the link between host and device (``transfers.py``).
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mixture
import table
import torch
import torch.distributed as dist
import transfers
from memory import BF16, COMPILED, GPT, LLAMA_1B, LLAMA_8B, SELECTIVE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.profiler import profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

from axonlaunch import config as configuration, data
from axonlaunch.comm import Backend, World
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.data.datasets.dataset import Batch, sample_inputs
from axonlaunch.data.datasets.loader import rank_loader
from axonlaunch.diagnostics.step_breakdown import STEP, breakdown
from axonlaunch.engines.build import build_engine
from axonlaunch.engines.recomputation.activation_checkpointing import apply_activation_checkpointing
from axonlaunch.models.build import construct
from axonlaunch.models.facts.flops import ModelFlops
from axonlaunch.models.tensors.initialization import materialize
from axonlaunch.planning.tracing.shape_only_data import replace_with_synthetic
from axonlaunch.preflight.checks import resolve_anywhere
from axonlaunch.training.measuring.device_use import hardware_of, peak_flops
from axonlaunch.training.process.arithmetic import attention_kernels, configure_arithmetic

STEPS, ROUNDS = 8, 3
STEPS_OF_8B = 3  # each of a second or more
AGAINST_HAND, AGAINST_TITAN = 0.99, 0.97
MFU = {"1.2B": 0.40, "1.2B compiled": 0.48}
"""Required on an H100: 0.410 and 0.496 were measured, and 0.383 and 0.456 as torchtitan."""
SHARED_8B = [*LLAMA_8B, "strategy=fsdp", SELECTIVE]
CASES: dict[str, tuple[int, list[str]]] = {
    "gpt2": (1, [*GPT, "strategy=single", BF16]),
    "1.2B": (1, [*LLAMA_1B, "strategy=single", BF16]),
    "1.2B compiled": (1, [*LLAMA_1B, "strategy=single", BF16, COMPILED]),
    "8B of 8": (8, SHARED_8B),
    "8B of 8 compiled": (8, [*SHARED_8B, COMPILED]),
}
TINY = [
    *("model=llama_debug", "data=synthetic_tokens", "data.sequence_length=32"),
    *("model.hidden_size=64", "train.global_batch_size=4", BF16),
]
CASES_OF_CPU: dict[str, tuple[int, list[str]]] = {
    "tiny": (1, [*TINY, "strategy=single"]),
    "tiny of 4": (4, [*TINY, "strategy=fsdp", SELECTIVE]),
}
Step = Callable[[Batch], object]


@dataclass(frozen=True)
class Work:
    """The task of all contestants.

    Attributes:
        config: Configuration of the run.
        device: Device of the run.
        ranks: Number of ranks that share the model; only one exists.
        batches: A few batches on the host, used repeatedly.
    """

    config: RunConfig
    device: torch.device
    ranks: int
    batches: list[Batch]


def main() -> int:
    """Time every case."""
    args = table.arguments(__doc__ or "")
    cases = CASES if args.device == "cuda" else CASES_OF_CPU
    is_cuda = args.device == "cuda"
    if args.case:
        device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
        if is_cuda:
            torch.cuda.set_device(device)
        model = transfers.MODEL if is_cuda else transfers.MODEL_OF_CPU
        if args.case == transfers.SAVES:
            found = transfers.saved(model, device)
        elif args.case in mixture.CASES:
            found = mixture.timed(args.case, device)
        elif args.case in transfers.OFFLOADED:
            found = passing([*model, *transfers.OFFLOADED[args.case]], device)
        else:
            ranks, overrides = cases[args.case]
            found = timed(overrides, ranks, device, trace=_trace_of(args.case))
        sys.stdout.write(json.dumps(found))
        return 0

    def case(name: str) -> table.Row:
        asked = [sys.executable, __file__, "--device", args.device, "--case", name]
        ran = table.ended(asked)
        if ran.returncode:
            return table.Row(name, problem=table.why(name, ran.stderr))
        found = json.loads(ran.stdout.splitlines()[-1])
        if name == transfers.SAVES:
            return transfers.of_saves(**found)
        if name in mixture.CASES:
            return mixture.judged(name, found, on_cuda=is_cuda)
        if name in transfers.OFFLOADED:
            return transfers.of_offload(name, found, on_cuda=is_cuda)
        row = judged(name, **found)
        if not row.problem:
            _trace_of(name).unlink(missing_ok=True)
        return row

    names = [*cases, *mixture.CASES, *transfers.OFFLOADED, transfers.SAVES]
    return table.run(names, args.only, case)


def _trace_of(name: str) -> Path:
    return table.OUTPUTS / f"{name}.trace.json"


def passing(overrides: list[str], device: torch.device) -> dict[str, float]:
    """Return the transfers between host and device in a step of a run on one rank."""
    work, sample = _work(overrides, 1, device)
    step = _axonlaunch(work, sample)
    return transfers.passing(lambda: step(work.batches[0]), device)


def timed(overrides: list[str], ranks: int, device: torch.device, *, trace: Path) -> dict[str, Any]:
    """Time the contestants of one case and write axonlaunch's trace; return arguments for
    ``judged``.
    """
    work, sample = _work(overrides, ranks, device)
    makers: dict[str, Callable[[Work], Step]] = {
        "axonlaunch": lambda model: _axonlaunch(model, sample),
        "by hand": _by_hand,
        "as torchtitan": _as_torchtitan,
    }
    passes, rounds, steps = (1, 2, 2)
    if device.type == "cuda":
        passes, rounds, steps = (2, ROUNDS, STEPS if ranks == 1 else STEPS_OF_8B)
    seconds: dict[str, list[float]] = {who: [] for who in makers}
    issued: dict[str, list[float]] = {who: [] for who in makers}
    use: dict[str, Any] = {}
    for left in reversed(range(passes)):
        # Only one at a time is in the device's memory. axonlaunch is the last to be timed, because
        # profiling it has lasting effects in the process.
        for who, make in reversed(makers.items()) if left == 0 else makers.items():
            step = make(work)
            own_gc = who != "by hand"
            with attention_kernels(work.config.train, device):
                timed_rounds = [_round(step, work, steps, own_gc=own_gc) for _ in range(rounds)]
                seconds[who] += [took for took, _ in timed_rounds[1:]]
                issued[who] += [host for _, host in timed_rounds[1:]]
                if who == "axonlaunch" and left == 0:
                    use = _use(step, work, trace)
            del step
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    tokens = work.batches[0].targets.numel()
    rates = {who: tokens / statistics.median(times) for who, times in seconds.items()}
    return {
        "rates": rates,
        "spread": {who: max(times) / min(times) for who, times in seconds.items()},
        "host": {who: statistics.median(times) for who, times in issued.items()},
        "flops_per_token": _flops(work.config, sample.shape[-1]),
        "peak": _peak(work.config, device),
        **use,
    }


def _work(overrides: list[str], ranks: int, device: torch.device) -> tuple[Work, torch.Tensor]:
    """Join a world without its other ranks; return the case's work in it, and a sample."""
    config = resolve_anywhere(
        replace_with_synthetic(configuration.load([*overrides, f"launch.nproc={ranks}"]))
    )
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    configure_arithmetic(config.train)
    dataset = data.build_dataset(config.data, config.tokenizer)
    layout = Layout.of(config, world_size=ranks)
    loader = rank_loader(config, dataset, layout=layout, rank=0, pin_memory=device.type == "cuda")
    batches = [cast("Batch", loader.batch(step)) for step in range(4)]  # all of them of tokens
    return Work(config, device, ranks, batches), sample_inputs(dataset)


def judged(
    name: str,
    rates: dict[str, float],
    flops_per_token: float,
    peak: float | None,
    spread: Mapping[str, float] | None = None,
    host: Mapping[str, float] | None = None,
    launches: int = 0,
    parts: Mapping[str, float] | None = None,
) -> table.Row:
    """Return a row; ratios and MFU are required if the device's peak is known.

    Args:
        name: Name of the case.
        rates: Tokens per second of each contestant.
        flops_per_token: FLOPs of forward and backward per token.
        peak: Peak of the device in FLOP/s; None if it is unknown.
        spread: Slowest round over fastest round of each contestant.
        host: Seconds until the host has issued a step; equal to the step if the device waits for
            the host.
        launches: Number of kernels in a step of axonlaunch.
        parts: Fractions of that step. It was profiled, which makes a slow host even slower.
    """
    cells = {f"{who}, tokens/s": f"{rate:,.0f}" for who, rate in rates.items()}
    cells |= {f"{who}, slowest/fastest": f"{ratio:.2f}" for who, ratio in (spread or {}).items()}
    cells |= {f"{who}, host ms": f"{1e3 * took:.1f}" for who, took in (host or {}).items()}
    ours = rates["axonlaunch"]
    problems = []
    for who, least in (("by hand", AGAINST_HAND), ("as torchtitan", AGAINST_TITAN)):
        ratio = ours / rates[who]
        cells[f"of {who}"] = f"{ratio:.3f}"
        if peak is not None and ratio < least:
            problems.append(f"{ratio:.3f} of {who}, {least} is required")
    if peak is not None:
        mfu = ours * flops_per_token / peak
        cells["MFU"] = f"{mfu:.1%}"
        if mfu < MFU.get(name, 0.0):
            problems.append(f"MFU {mfu:.1%}, {MFU[name]:.0%} is required")
    cells["kernels"] = f"{launches:,}"
    cells |= {kind: f"{share:.1%}" for kind, share in (parts or {}).items() if share}
    return table.Row(name, cells, "; ".join(problems))


def _round(step: Step, work: Work, steps: int, *, own_gc: bool) -> tuple[float, float]:
    """Return the mean seconds of a step, and the seconds until the host had issued it."""
    with _collected_by_hand() if own_gc else nullcontext():
        _wait(work.device)
        began = time.perf_counter()
        for number in range(steps):
            step(work.batches[number % len(work.batches)])
        issued = time.perf_counter() - began
        _wait(work.device)
        return (time.perf_counter() - began) / steps, issued / steps


def _use(step: Step, work: Work, path: Path) -> dict[str, Any]:
    """Return a step's number of kernels (on a CPU, operations), and the fractions of its parts."""
    with profile() as profiled:
        with record_function(f"{STEP} 1"):
            step(work.batches[0])
        _wait(work.device)
    path.parent.mkdir(exist_ok=True)
    profiled.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
    shares = breakdown(trace, rank=0)
    kind = "kernel" if work.device.type == "cuda" else "cpu_op"
    launches = sum(event.get("cat") == kind for event in trace["traceEvents"])
    parts = {kind: seconds / shares.step_s for kind, seconds in shares.parts.items()}
    return {"launches": launches, "parts": parts}


@contextmanager
def _collected_by_hand() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _flops(config: RunConfig, positions: int) -> float:
    with torch.device("meta"):
        model = construct(config.model, seed=0)
    return ModelFlops.of(model).per_token(positions)


def _peak(config: RunConfig, device: torch.device) -> float | None:
    return peak_flops(hardware_of(device), config.train)


def _axonlaunch(work: Work, sample: torch.Tensor) -> Step:
    world = World(
        rank=0,
        local_rank=0,
        world_size=work.ranks,
        device=work.device,
        backend=Backend.MOCK,
    )
    return build_engine(work.config, world, sample=sample).train_step


def _model(work: Work) -> Any:
    """Return the case's model with weights drawn on the device, whose values do not affect
    speed.
    """
    with torch.device("meta"):
        model = construct(work.config.model, seed=0)
    materialize(model, device=work.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    return model


def _blocks(model: Any) -> list[Any]:
    return list(model.layers)


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _by_hand(work: Work) -> Step:
    model = _model(work)
    _recompute(work, model)
    if work.config.train.compile:
        for block in _blocks(model):
            block.compile()
    options = _sharding(work)
    for block in _blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = _adamw(model)

    def step(batch: Batch) -> None:
        inputs = batch.inputs.to(work.device, non_blocking=True)
        targets = batch.targets.to(work.device, non_blocking=True)
        _cross_entropy(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _as_torchtitan(work: Work) -> Step:
    model = _model(work)
    _recompute(work, model)
    options = _sharding(work)
    loss: Any = _cross_entropy
    if work.config.train.compile:
        for block in _blocks(model):
            block.compile(fullgraph=True)
        loss = torch.compile(loss)
    tied = model.lm_head.weight is model.embed_tokens.weight
    if not tied:
        fully_shard(model.embed_tokens, **options)
        fully_shard([model.norm, model.lm_head], reshard_after_forward=False, **options)
    for block in _blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = _adamw(model)

    def step(batch: Batch) -> None:
        inputs = batch.inputs.to(work.device, non_blocking=True)
        targets = batch.targets.to(work.device, non_blocking=True)
        loss(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _sharding(work: Work) -> dict[str, Any]:
    mesh = init_device_mesh(work.device.type, (work.ranks,), mesh_dim_names=("dp_shard",))
    return {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def _recompute(work: Work, model: Any) -> None:
    """Recompute the same activations as axonlaunch, so that all do the same products."""
    mode = work.config.train.recomputation
    apply_activation_checkpointing(_blocks(model), mode=mode)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


if __name__ == "__main__":
    sys.exit(main())
