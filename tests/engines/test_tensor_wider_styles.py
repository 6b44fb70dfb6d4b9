"""Styles beyond Megatron's pairs: each computes and learns like the undivided module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.tensor_cases import assert_same_gradients, axis, on_ranks
from torch import Tensor, nn

import axonlaunch as ax
from axonlaunch.engines.tensor.parallelize import parallelize
from axonlaunch.engines.tensor.plan_checks import plan_issues

WIDTH, HEADS, EXPERTS = 24, 4, 3


class Attention(nn.Module):
    """Two key-value heads for four query heads, with a norm for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.num_key_value_groups = 6, HEADS, 2
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH // 2)
        self.v_proj = nn.Linear(WIDTH, WIDTH // 2)
        self.norm = nn.LayerNorm(self.head_dim)
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.norm(self.q_proj(x).view(batch, -1, self.num_heads, self.head_dim))
        k, v = (
            layer(x).view(batch, length, -1, self.head_dim) for layer in (self.k_proj, self.v_proj)
        )
        k, v = (heads.repeat_interleave(self.num_key_value_groups, dim=2) for heads in (k, v))
        mixed = F.scaled_dot_product_attention(*(heads.transpose(1, 2) for heads in (q, k, v)))
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Fused(nn.Module):
    """Query, key and value in one weight with GPT-2's memory layout; gate and up in another."""

    class Conv(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.nf = outputs
            self.weight = nn.Parameter(torch.randn(inputs, outputs) / 5)
            self.bias = nn.Parameter(torch.randn(outputs))

        def forward(self, x: Tensor) -> Tensor:
            flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
            return flat.view(*x.shape[:-1], self.nf)

    def __init__(self) -> None:
        super().__init__()
        self.split_size = WIDTH
        self.qkv, self.out = self.Conv(WIDTH, 3 * WIDTH), self.Conv(WIDTH, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(self.split_size, dim=-1)
        x = self.out(q * k.sigmoid() + v)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Whole(nn.Module):
    """Has a norm over all features between two layers, which needs gathered features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.up, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x + self.embed((x[..., 0] > 0).long()))))


class Experts(nn.Module):
    """Gate and up projections of all experts in one parameter, with routing weights as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH, WIDTH) / 5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 5)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("...h,eih->...ei", x, self.gate_up).chunk(2, dim=-1)
        return torch.einsum("...ei,ehi,...e->...h", F.silu(gate) * up, self.down, weights)


class Routed(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.router(x).softmax(-1))


class Scaled(nn.Embedding):
    """Multiplies the rows that it looks up."""

    def forward(self, entries: Tensor) -> Tensor:
        return super().forward(entries) * 3


class Looked(nn.Module):
    """A scaled embedding with a sharded vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Scaled(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.embed((x[..., 0] * 4).long().clamp(0, 11))


PROJECTIONS = {"q_proj": "column", "k_proj": "key_value", "v_proj": "key_value", "o_proj": "row"}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "heads in a region": (Attention, {**PROJECTIONS, "": "region"}),
    "heads, each layer by itself": (Attention, {**PROJECTIONS, "norm": "replicated_summed"}),
    "packed": (
        Fused,
        {"qkv": "packed_column/3", "out": "row", "gate_up": "packed_column", "down": "row"},
    ),
    "gathered": (
        Whole,
        {"embed": "column_gathered", "up": "column_gathered", "down": "row_split"},
    ),
    "experts": (
        Routed,
        {"experts.gate_up": "packed_column", "experts.down": "row", "experts": "experts"},
    ),
    "scaled embedding": (Looked, {"embed": "vocabulary"}),
}


def made(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return build().double()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_wider_tensor_style_equals_undivided_module(case: str, size: int) -> None:
    build, plan = CASES[case]
    inputs = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.manual_seed(3))
    undivided, x = made(build), inputs.clone().requires_grad_()
    expected = undivided(x)
    expected.square().sum().backward()

    def on_rank(world: ax.World) -> None:
        divided, full_inputs = made(build), inputs.clone().requires_grad_()
        parallelize(divided, plan, mesh=axis(world))
        outputs = divided(full_inputs)
        torch.testing.assert_close(outputs, expected.detach())
        outputs.square().sum().backward()
        torch.testing.assert_close(full_inputs.grad, x.grad)
        assert_same_gradients(divided, undivided)

    on_ranks(size, on_rank)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            "heads in a region",
            {"q_proj": "column_gathered"},
            "it is inside a region, where each rank",
        ),
        ("experts", {"experts.down": ""}, "must shard all its parameters, but not down"),
        ("experts", {"experts": "replicated"}, "give experts itself the style experts"),
        ("packed", {"qkv": "packed_column/5"}, "which 2 does not divide"),
        ("packed", {"down": "packed_column/x"}, "there is no style 'packed_column/x'"),
    ],
)
def test_unsupported_wider_tensor_style_is_error(
    case: str, changes: dict[str, str], message: str
) -> None:
    build, plan = CASES[case]
    changed = {name: style for name, style in {**plan, **changes}.items() if style}
    issues = plan_issues(build(), changed, degree=2, sequence_parallel=False)
    assert message in "; ".join(text for _, text in issues)


def test_ranks_that_share_a_head_are_a_multiple_of_the_heads() -> None:
    build, plan = CASES["heads in a region"]
    assert not plan_issues(build(), plan, degree=4, sequence_parallel=False)
    issues = plan_issues(build(), plan, degree=3, sequence_parallel=False)
    assert ("", "num_heads=4 cannot be sharded over 3 ranks; use 1, 2 or 4") in issues
