"""Times the experts of one rank beside torchtitan's way, forward and backward.

Both compute the same tokens, choices, weights and matrices in bf16, and their results must be
equal. torchtitan counts the tokens with ``histc``, sorts them by expert, multiplies in grouped
products and adds up the weighted rows with ``index_add``. Under an expert axis, here of one rank,
both read the sizes of the exchange on the host, and order the received rows by expert.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import table
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from axonlaunch.comm import Backend, World
from axonlaunch.config.options.model import MoEConfig
from axonlaunch.engines.expert.dispatch import AllToAll
from axonlaunch.engines.expert.experts import dispatch_experts
from axonlaunch.models.architectures.moe import Experts

AGAINST_TITAN = 0.99
CASES = {"experts": False, "experts, dispatched": True}
"""Whether the experts are under an expert axis."""
SIZES: dict[str, Any] = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
SIZES_OF_CPU: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8}
TOKENS, TOP_K, ROUNDS, REPEATS = 16384, 8, 9, 10
TOKENS_OF_CPU, TOP_K_OF_CPU = 64, 2
Step = Callable[[], Tensor]


def timed(name: str, device: torch.device) -> dict[str, float]:
    """Return tokens per second of each contestant, and the difference of their results."""
    is_dispatched, is_cuda = CASES[name], device.type == "cuda"
    tokens, top_k = (TOKENS, TOP_K) if is_cuda else (TOKENS_OF_CPU, TOP_K_OF_CPU)
    torch.manual_seed(0)
    sizes = SIZES if is_cuda else SIZES_OF_CPU
    model = nn.ModuleDict({"experts": Experts(MoEConfig(**sizes))}).to(device, torch.bfloat16)
    for matrix in model.parameters():
        nn.init.normal_(matrix, std=0.02)
    gate_up, down = (p.detach().clone().requires_grad_() for p in model.parameters())
    scores = torch.rand(tokens, sizes["num_experts"], device=device)
    weights, choice = scores.topk(top_k)
    hidden = torch.randn(tokens, sizes["hidden_size"], device=device, dtype=torch.bfloat16)
    if is_dispatched:
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
        world = World(rank=0, local_rank=0, world_size=1, device=device, backend=Backend.MOCK)
        mesh = world.lay_out({"ep": 1}).device_mesh["ep"]
        dispatch_experts(model, ["experts"], mesh=mesh, make_dispatch=AllToAll)
    steps: dict[str, Step] = {
        "axonlaunch": lambda: model["experts"](hidden, choice, weights),
        "as torchtitan": lambda: as_torchtitan(
            (hidden, choice, weights), gate_up, down, is_dispatched=is_dispatched
        ),
    }
    one, other = (step().float() for step in steps.values())
    seconds: dict[str, list[float]] = {who: [] for who in steps}
    for number in range(ROUNDS):
        for who in reversed(steps) if number % 2 else steps:
            seconds[who].append(_round(steps[who], device))
    rates = {who: tokens / statistics.median(times[1:]) for who, times in seconds.items()}
    return {**rates, "off": float((one - other).norm() / other.norm())}


def as_torchtitan(
    routed: tuple[Tensor, Tensor, Tensor], gate_up: Tensor, down: Tensor, *, is_dispatched: bool
) -> Tensor:
    """Return each token's weighted sum of the results of its experts, [T, hidden].

    Args:
        routed: Tokens [T, hidden], their experts [T, K] and the weights of these [T, K].
        gate_up: Gate and up projections, [E, 2 x width, hidden].
        down: Down projections, [E, hidden, width].
        is_dispatched: Whether to do what an exchange of rows needs.
    """
    hidden, choice, weights = routed
    experts = choice.flatten()
    counted = experts if experts.is_cuda else experts.float()  # on a CPU, histc takes only floats
    counts = torch.histc(counted, bins=len(gate_up), min=0, max=len(gate_up))
    order = experts.argsort(stable=True)
    places = order // choice.shape[1]
    rows, received = hidden[places], torch.arange(len(places), device=hidden.device)
    if is_dispatched:
        counts.tolist()
        rows = rows[received]  # a kernel of torchtitan computes these indices
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = (
        F.grouped_mm(rows, matrix.transpose(-2, -1), offs=ends)
        for matrix in gate_up.chunk(2, dim=1)
    )
    results = F.grouped_mm(F.silu(gate) * up, down.transpose(-2, -1), offs=ends)
    if is_dispatched:
        results = torch.empty_like(results).index_copy(0, received, results)
    weighted = (results.float() * weights.flatten()[order].unsqueeze(-1)).to(hidden.dtype)
    return torch.zeros_like(hidden).index_add(0, places, weighted)


def judged(name: str, found: dict[str, float], *, on_cuda: bool) -> table.Row:
    """Return the row of a case; on a GPU axonlaunch must be as fast as torchtitan."""
    cells = {f"{who}, tokens/s": f"{found[who]:,.0f}" for who in ("axonlaunch", "as torchtitan")}
    ratio = found["axonlaunch"] / found["as torchtitan"]
    cells["of as torchtitan"] = f"{ratio:.3f}"
    problems = []
    if found["off"] > 0.01:  # weights round once or twice to bf16
        problems.append(f"results differ by {found['off']:.1%}")
    if on_cuda and ratio < AGAINST_TITAN:
        problems.append(f"{ratio:.3f} of as torchtitan, {AGAINST_TITAN} is required")
    return table.Row(name, cells, "; ".join(problems))


def _round(step: Any, device: torch.device) -> float:
    """Return the mean seconds of a forward and backward."""
    repeats = REPEATS if device.type == "cuda" else 1
    _wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        step().sum().backward()
    _wait(device)
    return (time.perf_counter() - began) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
