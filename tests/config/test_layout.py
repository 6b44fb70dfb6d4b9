"""The arithmetic of layouts, and what is left to the machine."""

import pytest

from axonlaunch import config
from axonlaunch.config.layout import layout, resolved


@pytest.mark.parametrize(
    ("overrides", "accelerators", "nproc", "kind"),
    [
        ([], 0, 2, "ddp"),
        ([], 1, 1, "none"),
        ([], 4, 4, "ddp"),
        (["strategy=single"], 4, 1, "none"),
        (["strategy=fsdp"], 0, 2, "fsdp"),
        (["strategy=fsdp"], 8, 8, "fsdp"),
        (["launch.nproc=1"], 8, 1, "none"),
        (["launch.nproc=4", "strategy=zero1"], 0, 4, "zero1"),
    ],
)
def test_what_is_left_to_the_machine_is_resolved(
    overrides: list[str], accelerators: int, nproc: int, kind: str
) -> None:
    chosen = resolved(config.load(overrides), accelerators=accelerators)
    assert (chosen.launch.nproc, chosen.strategy.data_parallel) == (nproc, kind)


@pytest.mark.parametrize(
    ("overrides", "world", "replicate", "shard", "micro", "micro_batches"),
    [
        (["strategy=ddp"], 4, 4, 1, 8, 1),
        (["strategy=fsdp"], 4, 1, 4, 8, 1),
        (["strategy=hsdp", "strategy.fsdp.replicate=2"], 4, 2, 2, 8, 1),
        (["strategy=hsdp"], 4, 1, 4, 8, 1),
        (["strategy=fsdp", "strategy.fsdp.sharding=no_shard"], 4, 4, 1, 8, 1),
        (["strategy=fsdp", "train.micro_batch_size=2"], 4, 1, 4, 2, 4),
        (["strategy=single"], 1, 1, 1, 32, 1),
    ],
)
def test_shares_of_the_batch_follow_from_the_layout(
    overrides: list[str], world: int, replicate: int, shard: int, micro: int, micro_batches: int
) -> None:
    shares = layout(config.load(["train.global_batch_size=32", *overrides]), world_size=world)
    assert (shares.dp_replicate, shares.dp_shard) == (replicate, shard)
    assert (shares.micro_batch_size, shares.micro_batches) == (micro, micro_batches)
    assert shares.data_ranks * micro * micro_batches == 32
