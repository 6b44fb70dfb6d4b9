"""Tests of what a custom loss may return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import axonlaunch as ax
from axonlaunch.config import load
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
        (torch.ones(()), "a tensor without a gradient"),
    ],
)
def test_result_that_is_no_sum_with_a_gradient_names_the_loss(
    returned: list[Any], value: Any, what: str
) -> None:
    returned[:] = [value]
    loss = build_custom_loss(load([f"train.loss={NAME}"]).train)
    assert loss is not None
    with pytest.raises(ValueError, match=f"train.loss={NAME} returned {what}; return the sum"):
        loss.sum(None, None)


def test_evaluation_needs_no_gradient(returned: list[Any]) -> None:
    returned[:] = [torch.ones(())]
    loss = build_custom_loss(load([f"train.loss={NAME}"]).train)
    assert loss is not None
    with torch.no_grad():
        assert loss.sum(None, None) == 1
