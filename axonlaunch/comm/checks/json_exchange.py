"""Exchanges plain values between ranks as JSON in tensors.

In contrast to torch's object collectives, received data is never unpickled.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def all_gather_json(value: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of each rank, by rank in the group; every rank must call this.

    Args:
        value: Plain value that JSON can represent; tuples are received as lists.
        group: Process group, by default that of all ranks.

    Raises:
        ValueError: Received data is not JSON.
    """
    group = group or dist.group.WORLD
    assert group is not None
    device = _device(group)
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([content.numel()], device=device)
    lengths = [torch.zeros_like(length) for _ in range(group.size())]
    dist.all_gather(lengths, length, group=group)
    max_length = int(torch.cat(lengths).max())
    padded = torch.zeros(max_length, dtype=torch.uint8, device=device)
    padded[: content.numel()] = content
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    return [
        json.loads(bytes(row[: int(size)].tolist()))
        for row, size in zip(gathered, lengths, strict=True)
    ]


def _device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of the group's tensors: this rank's GPU with NCCL."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
