"""Plain values from every rank to every rank, as JSON in tensors.

torch's object collectives unpickle what arrives; nothing here does.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def all_gather_json(value: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of each rank, by its rank in the group; every rank calls this.

    Args:
        value: Plain values; tuples arrive as lists.
        group: Default: all ranks.

    Raises:
        ValueError: What arrived is not JSON.
    """
    group = group or dist.group.WORLD
    assert group is not None
    device = _device(group)
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([content.numel()], device=device)
    lengths = [torch.zeros_like(length) for _ in range(group.size())]
    dist.all_gather(lengths, length, group=group)
    longest = int(torch.cat(lengths).max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: content.numel()] = content
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    return [
        json.loads(bytes(text[: int(size)].tolist()))
        for text, size in zip(gathered, lengths, strict=True)
    ]


def _device(group: dist.ProcessGroup) -> torch.device:
    """Return where the group's tensors are: on this rank's device under NCCL."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
