"""Tensors that describe slices of others have the values of torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from axonlaunch.models.tensors.tensor_origins import CannotPlaceError, OriginTensor

SOURCES = {
    name: torch.arange(100.0 * n, 100.0 * n + 24).reshape(4, 6) for n, name in enumerate("abcd")
}


def read(name: str, region: tuple[slice, ...]) -> Tensor:
    return SOURCES[name][region]


def packed_experts(tensors: dict[str, Any]) -> Any:
    gates = torch.stack([tensors["a"], tensors["b"]], dim=0)
    return torch.cat([gates, torch.stack([tensors["c"], tensors["d"]], dim=0)], dim=1)


OPERATIONS = {
    "as it is": lambda tensors: tensors["a"],
    "joined": lambda tensors: torch.cat([tensors["a"], tensors["b"]], dim=1),
    "packed experts": packed_experts,
    "turned": lambda tensors: torch.transpose(packed_experts(tensors), 1, 2),
    "a part": lambda tensors: torch.chunk(tensors["a"], 2, dim=-1)[1],
    "uneven parts": lambda tensors: torch.split(tensors["a"], [1, 3], dim=0)[1],
    "a part of what was turned": lambda tensors: tensors["c"].T.chunk(3, 0)[2],
    "squeezed": lambda tensors: torch.chunk(packed_experts(tensors), 2, dim=0)[1].squeeze(0),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_pieces_equal_torch_slices(operation: Any) -> None:
    expected = operation(SOURCES)
    laid = operation({name: OriginTensor.full(name, (4, 6)) for name in SOURCES})
    assert laid.shape == expected.shape
    for offsets in [[0] * expected.ndim, [1] * expected.ndim]:
        lengths = [min(2, size - o) for size, o in zip(expected.shape, offsets, strict=True)]
        into = torch.full(lengths, torch.nan)
        laid.read(read, offsets, lengths, into)
        region = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        assert torch.equal(into, expected[region])


def test_pieces_read_only_their_region() -> None:
    regions = []

    def counted(name: str, region: tuple[slice, ...]) -> Tensor:
        regions.append((name, SOURCES[name][region].numel()))
        return read(name, region)

    laid = packed_experts({name: OriginTensor.full(name, (4, 6)) for name in SOURCES})
    laid.read(counted, [1, 0, 0], [1, 4, 3], torch.empty(1, 4, 3))
    assert regions == [("b", 12)]


def test_an_operation_that_computes_is_refused() -> None:
    with pytest.raises(CannotPlaceError):
        torch.add(OriginTensor.full("a", (4, 6)), 1)  # type: ignore[call-overload]
