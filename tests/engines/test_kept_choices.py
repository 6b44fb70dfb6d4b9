"""Recomputation of blocks whose router would choose other experts the second time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axonlaunch.comm import RankFailedError, World
from axonlaunch.engines.expert.dispatch import AllToAll
from axonlaunch.engines.expert.experts import dispatch_experts
from axonlaunch.engines.recomputation.activation_checkpointing import (
    Mode,
    apply_activation_checkpointing,
)

EXPERTS, TOKENS = 4, 6
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]


class Scaling(nn.Module):
    """Experts that multiply by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.scale = nn.Parameter(torch.arange(1.0, EXPERTS + 1).view(EXPERTS, 1))

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        scales = self.scale[experts].squeeze(-1)
        return (hidden.unsqueeze(1) * (scales * weights).unsqueeze(-1)).sum(1)


def best_two(scores: Tensor) -> tuple[Tensor, Tensor]:
    values, experts = torch.topk(scores, 2)
    return values, experts


def one_after_another(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Choose two experts as Phimoe does."""
    first = scores.max(dim=-1)[1].unsqueeze(-1)
    second = scores.scatter(-1, first, float("-inf")).max(dim=-1)[1].unsqueeze(-1)
    experts = torch.cat([first, second], dim=-1)
    return scores.gather(-1, experts), experts


class WaveringBlock(nn.Module):
    """A block whose router has nearly equal scores, rounded in turn up and down."""

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self.experts, self.router = Scaling(), nn.Parameter(torch.ones(2, EXPERTS))
        self.rounding, self.choose = 1e-6, choose

    def forward(self, hidden: Tensor) -> Tensor:
        up_or_down = self.rounding * torch.linspace(-1, 1, EXPERTS)
        self.rounding = -self.rounding
        values, experts = self.choose((hidden @ self.router + up_or_down).softmax(-1))
        values /= values.sum(-1, keepdim=True)  # in place, like the routers of transformers
        return self.experts(hidden, experts, values)


class Counting(AllToAll):
    """A dispatch that records how many rows it sends to each rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent: list[list[int]] = []

    def send(self, hidden: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, object]:
        rows, local_experts, routes = super().send(hidden, experts)
        self.sent.append(routes.sent)  # type: ignore[attr-defined]
        return rows, local_experts, routes


def run_block(
    mode: Mode, num_experts: int, choose: Choose = best_two
) -> list[tuple[list[list[int]], list[Tensor]]]:
    """Return the sent rows of each forward and the gradients, for each of two ranks."""

    def run(world: World) -> Any:
        block = WaveringBlock(choose)
        mesh = world.lay_out({"ep": world.world_size}).device_mesh["ep"]
        dispatch_experts(block, ["experts"], mesh=mesh, make_dispatch=Counting)
        apply_activation_checkpointing([block], mode=mode, num_experts=num_experts)
        hidden = torch.arange(2.0 * TOKENS).view(TOKENS, 2) / 10 + world.rank
        hidden.requires_grad_()
        block(hidden).square().sum().backward()
        experts: Any = block.experts
        gradients = [hidden.grad, block.router.grad, experts.scale.grad.to_local()]
        return experts.dispatch.sent, gradients

    return World.mock(2).run(run)


@pytest.mark.parametrize("choose", [best_two, one_after_another])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_block_sends_tokens_to_the_experts_of_the_forward(
    mode: Mode, choose: Choose
) -> None:
    expected = run_block("none", EXPERTS, choose)
    recomputed = run_block(mode, EXPERTS, choose)
    for ([sent], gradients), ([first, again], actual) in zip(expected, recomputed, strict=True):
        assert first == again == sent == [0, 2 * TOKENS]
        for one, other in zip(actual, gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_experts", [0, EXPERTS - 1])
def test_choice_among_more_scores_than_experts_is_made_again(num_experts: int) -> None:
    with pytest.raises(RankFailedError, match="Recomputed values"):
        run_block("full", num_experts)
