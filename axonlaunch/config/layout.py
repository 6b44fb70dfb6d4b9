"""What a configuration means for a world of a given size: how many of what.

Pure arithmetic on the typed tree; it starts nothing and refuses nothing (``rules`` does).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from axonlaunch.config.schema import RunConfig

DataParallel = Literal["none", "ddp", "zero1", "fsdp"]


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes and of a rank's share of a step.

    Attributes:
        data_parallel: The engine's kind, ``null`` resolved.
        dp_replicate: Ranks that hold the same shard.
        dp_shard: Ranks that one copy of the parameters is divided among.
        micro_batch_size: Samples per forward on one rank.
        micro_batches: Forwards per optimizer step on one rank (gradient accumulation).
    """

    data_parallel: DataParallel
    dp_replicate: int
    dp_shard: int
    micro_batch_size: int
    micro_batches: int

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        if self.data_parallel == "none":
            return "single"
        if self.data_parallel == "fsdp" and self.dp_replicate > 1 and self.dp_shard > 1:
            return f"fsdp {self.dp_replicate} x {self.dp_shard}"
        return f"{self.data_parallel} {self.data_ranks}"


def layout(config: RunConfig, *, world_size: int) -> Layout:
    """Lay a run out over a world; sizes are rounded down where they don't divide."""
    kind = config.strategy.data_parallel or ("ddp" if world_size > 1 else "none")
    replicate = replicas(config, world_size=world_size)
    share = max(1, config.train.global_batch_size // world_size)
    micro = config.train.micro_batch_size
    size = share if micro == "auto" else min(micro, share)
    return Layout(kind, replicate, max(1, world_size // replicate), size, max(1, share // size))


def replicas(config: RunConfig, *, world_size: int) -> int:
    """Return how many whole copies of the parameters the world holds."""
    fsdp = config.strategy.fsdp
    if config.strategy.data_parallel != "fsdp" or fsdp.sharding == "no_shard":
        return world_size
    if fsdp.sharding != "hybrid_shard" or fsdp.replicate == "auto":
        return 1  # one machine: hybrid sharding has one replica a node
    return fsdp.replicate


def resolved(config: RunConfig, *, accelerators: int) -> RunConfig:
    """Decide what was left to the machine: the number of ranks, and by it the strategy.

    ``launch.nproc=auto`` is one rank for one device, else one an accelerator, 2 without any.
    """
    nproc, kind = config.launch.nproc, config.strategy.data_parallel
    if nproc == "auto":
        nproc = 1 if kind == "none" else accelerators or 2
    return dataclasses.replace(
        config,
        launch=dataclasses.replace(config.launch, nproc=nproc),
        strategy=dataclasses.replace(
            config.strategy, data_parallel=kind or ("ddp" if nproc > 1 else "none")
        ),
    )
