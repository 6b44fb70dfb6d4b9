"""Tests of what a custom loss may return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.rank_engine import rank_engine

import axonlaunch as ax
from axonlaunch.comm import World
from axonlaunch.comm.errors import RankFailedError
from axonlaunch.config import ConfigError, load
from axonlaunch.config.options.losses import LOSSES
from axonlaunch.models.specs.custom_loss import build_custom_loss

NAME = "returned_by_a_test"


@pytest.fixture
def returned() -> Iterator[list[Any]]:
    """A list with what the registered loss returns."""
    values: list[Any] = []
    ax.register_loss(NAME)(lambda outputs, batch: values[0])
    yield values
    del LOSSES._entries[NAME]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (1.5, "float"),
        (None, "NoneType"),
        (torch.ones(3, requires_grad=True), r"a tensor of shape \[3\]"),
    ],
)
def test_result_that_is_no_sum_names_the_loss(returned: list[Any], value: Any, what: str) -> None:
    returned[:] = [value]
    loss = build_custom_loss(load([f"train.loss={NAME}"]).train)
    assert loss is not None
    with pytest.raises(ConfigError, match=f"train.loss={NAME}: it returned {what}; return the sum"):
        loss.sum(None, None)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_sum_may_have_dimensions_of_one_element(
    returned: list[Any], shape: tuple[int, ...]
) -> None:
    returned[:] = [torch.full(shape, 2.0)]
    loss = build_custom_loss(load([f"train.loss={NAME}"]).train)
    assert loss is not None
    assert torch.equal(loss.sum(None, None), torch.tensor(2.0))


def train_once(*overrides: str) -> None:
    """Compute the gradients of one batch in one process, with the registered loss."""
    chosen = run_config(["strategy=single", "launch.nproc=1", f"train.loss={NAME}", *overrides])

    def backward(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        engine.backward(loader.batch(0))

    World.mock(1).run(backward)


def test_loss_without_a_gradient_needs_one_of_the_router(returned: list[Any]) -> None:
    returned[:] = [torch.zeros(())]
    train_once("model=moe_debug", "model.router_aux_loss=0.1")
    with pytest.raises(RankFailedError, match=r"ConfigError.* it returned a tensor without a grad"):
        train_once("model=llama_debug")
