"""An update that streams through a GPU, which is made up: what is copied, kept and waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from axonlaunch.engines.optimizer import streaming

META, HOST = torch.device("meta"), torch.device("cpu")


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_host_memory_that_held_a_state_holds_it_again(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States on the host, the update on a device whose values nobody can read."""
    waiting: list[bool] = []
    copy: Any = torch.Tensor.copy_

    def copied(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> Any:
        if other.is_meta and not self.is_meta:
            waiting.append(not non_blocking)
            return self
        return copy(self, other, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    weight = nn.Parameter(torch.ones(3, device=META))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight] = {"momentum_buffer": torch.ones(3)}
    streaming.stream_parameters(optimizer, device=META, states_on=HOST, dtype=dtype)
    [before] = optimizer.state[weight].values()
    for _ in range(2):
        weight.grad = torch.ones(3, device=META)
        optimizer.step()
    [after] = optimizer.state[weight].values()
    assert after is before
    assert waiting == [False, False]


def test_a_parameter_of_the_host_is_written_to_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    copy: Any = torch.Tensor.copy_

    def copied(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> Any:
        if other.is_meta and not self.is_meta:
            written.append(self.data_ptr())
            return self
        return copy(self, other, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    streaming.stream_parameters(optimizer, device=META)
    optimizer.step()
    assert written == [weight.data_ptr()]


def test_an_update_waits_once_for_what_it_copied_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[torch.device] = []
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(streaming, "wait_for_copies", waits.append)
    weights = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    streaming.stream_parameters(optimizer, device=cuda)
    monkeypatch.setattr(streaming, "_copied", lambda tensor, device: tensor)
    for weight in weights:
        weight.grad = torch.ones(3)
    optimizer.step()
    assert waits == [cuda]
