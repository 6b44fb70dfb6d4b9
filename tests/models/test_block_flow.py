"""Values that pass through a model: parameters of each block, and values that pipelines can't
send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axonlaunch.models.fake.block_flow import BATCH, LENGTH, TOKENS, block_flow
from axonlaunch.models.specs.model_spec import BlockFlow, ModelOutputs

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden + self.linear(hidden)


class Returning(Block):
    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Any:
        return super().forward(hidden), self.linear.weight


class Model(nn.Module):
    """Embeds, calls three blocks with ``through``, and normalizes."""

    def __init__(self, through: Callable[..., Any], *, block: type = Block) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.through = through

    def forward(self, tokens: Tensor) -> Any:
        return self.through(self, self.table(tokens), tokens)


def usual(model: Any, hidden: Tensor, tokens: Tensor) -> Any:
    for block in model.blocks:
        hidden = block(hidden)
    return model.head(model.norm(hidden))


def flow(through: Callable[..., Any], **settings: Any) -> BlockFlow:
    with torch.device("meta"):
        model = Model(through, **settings)
    return block_flow(model, layers="blocks")


def test_block_flow_assigns_parameters_by_use() -> None:
    traced = flow(usual)
    assert not traced.problem
    assert traced.before_blocks == ("table",)
    assert traced.after_blocks == ("norm", "head")
    assert traced.returns == (None, None, None)


def test_block_flow_dims_before_blocks_follow_batch() -> None:
    class Positions(Model):
        def __init__(self) -> None:
            super().__init__(usual)
            self.first, self.flat = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, tokens: Tensor) -> Any:
            places = self.first(torch.arange(tokens.shape[1])[None])
            hidden = self.table(tokens) + places
            flat = self.flat(hidden.flatten(0, 1))
            return self.through(self, flat.view(hidden.shape), tokens)

    with torch.device("meta"):
        model = Positions()
    traced = block_flow(model, layers="blocks")
    assert traced.shapes == {
        "table": (BATCH, LENGTH, WIDTH),
        "first": (1, LENGTH, WIDTH),
        "flat": (TOKENS, WIDTH),
    }


def test_block_flow_detects_in_place_changes_before_blocks() -> None:
    def scaled(model: Any, hidden: Tensor, tokens: Tensor) -> Any:
        hidden *= 2
        return usual(model, hidden, tokens)

    assert flow(scaled).written == {"table"}
    assert not flow(usual).written


def test_block_may_return_unused_outputs() -> None:
    def first_alone(model: Any, hidden: Tensor, tokens: Tensor) -> Any:
        for block in model.blocks:
            hidden, _ = block(hidden)
        return model.head(model.norm(hidden))

    assert flow(first_alone, block=Returning).returns == (2, 2, 2)
    assert not flow(first_alone, block=Returning).problem


def test_a_tied_parameter_is_used_at_both_ends() -> None:
    class Tied(Model):
        def __init__(self) -> None:
            super().__init__(usual)
            self.head.weight = self.table.weight

    with torch.device("meta"):
        model = Tied()
    traced = block_flow(model, layers="blocks")
    assert (traced.before_blocks, traced.after_blocks) == (("table",), ("norm", "head"))


def beside(value: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Return calls that pass a second value to each block."""

    def through(model: Any, hidden: Tensor, tokens: Tensor) -> Any:
        more = value(model, hidden, tokens)
        for block in model.blocks:
            hidden = block(hidden, bias=more)
        return model.head(model.norm(hidden))

    return through


def between(change: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Return calls that change hidden states between blocks."""

    def through(model: Any, hidden: Tensor, tokens: Tensor) -> Any:
        for block in model.blocks:
            hidden = change(model, block(hidden), tokens)
        return model.head(model.norm(hidden))

    return through


def skipping(model: Any, hidden: Tensor, tokens: Tensor) -> Any:
    start = hidden
    for block in model.blocks:
        hidden = block(hidden)
    return model.head(model.norm(hidden + start))


def by_the_table(model: Any, hidden: Tensor, tokens: Tensor) -> Any:
    for block in model.blocks:
        hidden = block(hidden)
    return model.norm(hidden) @ model.table.weight.T


def with_a_loss(model: Any, hidden: Tensor, tokens: Tensor) -> Any:
    return ModelOutputs(usual(model, hidden, tokens), hidden.sum())


def backwards(model: Any, hidden: Tensor, tokens: Tensor) -> Any:
    for block in reversed(model.blocks):
        hidden = block(hidden)
    return model.head(model.norm(hidden))


@pytest.mark.parametrize(
    ("through", "problem"),
    [
        (beside(lambda model, hidden, tokens: model.head.weight), "bias, which is trained"),
        (beside(lambda model, hidden, tokens: tokens), "bias, which depends on the tokens"),
        (beside(lambda model, hidden, tokens: hidden.detach() * 2), "bias, which depends on"),
        (between(lambda model, hidden, tokens: hidden * 2), "not given the output of the previous"),
        (skipping, "depends on more than the output of the last block"),
        (by_the_table, "table.weight is used both before and after"),
        (with_a_loss, "its auxiliary loss needs all blocks"),
        (backwards, "is called out of order"),
        (lambda model, hidden, tokens: model.head(hidden), "blocks.0 is not called"),
        (between(lambda model, hidden, tokens: hidden * float(hidden.sum())), "without values"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_pipeline_cannot_send_are_named(
    through: Callable[..., Any], problem: str
) -> None:
    assert problem in flow(through).problem


def test_buffer_table_counts_as_parameter_missing_on_other_stages() -> None:
    class Fixed(Model):
        def __init__(self) -> None:
            super().__init__(beside(lambda model, hidden, tokens: model.angles.weight[:6] * 2))
            self.angles = nn.Embedding(16, WIDTH).requires_grad_(requires_grad=False)

    with torch.device("meta"):
        model = Fixed()
    assert "bias, which is made of a parameter" in block_flow(model, layers="blocks").problem


def test_values_derived_from_token_shape_may_pass_blocks() -> None:
    through = beside(lambda model, hidden, tokens: torch.ones_like(tokens).cumsum(1))
    assert not flow(through).problem
