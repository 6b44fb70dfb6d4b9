"""A DataLoader with the sampler reads the same samples as the loader, each once an epoch."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import axonlaunch as ax
from axonlaunch import config, data
from axonlaunch.comm import World
from axonlaunch.data.datasets.loader import Loader


def indices(samples: int, ranks: int, *, epoch: int = 0, **options: int) -> list[list[int]]:
    """Return the indices of each rank in an epoch."""

    def run(world: World) -> list[int]:
        sampler = ax.DistributedSampler(range(samples), world, **options)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        taken = list(sampler)
        assert len(taken) == len(sampler)
        return taken

    return World.mock(ranks).run(run)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("epoch", [0, 1])
def test_ranks_share_every_sample_once(batch_size: int, epoch: int) -> None:
    taken = indices(24, 4, epoch=epoch, batch_size=batch_size, seed=3)
    assert sorted(chain(*taken)) == list(range(24))
    assert {len(of_shard) for of_shard in taken} == {6}


def test_order_of_an_epoch_depends_only_on_seed_and_epoch() -> None:
    first = indices(40, 2)
    assert indices(40, 2) == first
    assert indices(40, 2, epoch=1) != first
    assert indices(40, 2, seed=1) != first


def test_unshuffled_order_is_dataset_order() -> None:
    assert indices(6, 2, shuffle=False) == [[0, 2, 4], [1, 3, 5]]
    assert indices(8, 2, shuffle=False, batch_size=2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert indices(6, 2, shuffle=False, batch_size=2, epoch=5) == [[0, 1, 4], [2, 3, 5]]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_leftover_samples_are_dropped_or_the_first_ones_taken_again(batch_size: int) -> None:
    [everything] = indices(10, 1, batch_size=batch_size)
    padded = indices(10, 4, batch_size=batch_size)
    assert sorted(chain(*padded)) == sorted(everything + everything[:2])
    dropped = indices(10, 4, batch_size=batch_size, drop_last=True)
    assert sorted(chain(*dropped)) == sorted(everything[:8])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_data_loader_gives_each_rank_its_rows(ranks: int) -> None:
    chosen = config.load(["data=synthetic_tokens", "data.sequence_length=4"])
    dataset = data.build_dataset(chosen.data)
    steps, batch_size = 5, 8 // ranks

    def run(world: World) -> list[Tensor]:
        class Samples(torch.utils.data.Dataset[Tensor]):
            def __len__(self) -> int:
                return dataset.num_samples

            def __getitem__(self, index: int) -> Tensor:
                import numpy as np

                return dataset.samples(np.array([index]), split="train").inputs[0]

        samples = Samples()
        sampler = ax.DistributedSampler(samples, world, batch_size=batch_size, seed=7)
        batches = DataLoader(samples, batch_size=batch_size, sampler=sampler)
        return [batch for batch, _ in zip(batches, range(steps), strict=False)]

    for rank, batches in enumerate(World.mock(ranks).run(run)):
        loader = Loader(dataset, seed=7, global_batch_size=8, num_shards=ranks, shard=rank)
        for step, batch in enumerate(batches):
            assert torch.equal(batch, loader.batch(step).inputs)


def test_training_on_any_number_of_ranks_sees_the_same_global_batches() -> None:
    inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))

    def train(ranks: int) -> Tensor:
        def run(world: World) -> Tensor:
            torch.manual_seed(0)
            module = torch.nn.Linear(3, 1)
            model = ax.DDP(module, sync="synchronous")
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            samples = TensorDataset(inputs)
            sampler = ax.DistributedSampler(samples)  # without shuffling; finds the world itself
            for epoch in range(2):
                sampler.set_epoch(epoch)
                for (batch,) in DataLoader(samples, batch_size=8 // ranks, sampler=sampler):
                    optimizer.zero_grad()
                    model(batch).square().mean().backward()
                    optimizer.step()
            return module.weight.detach()

        return World.mock(ranks).run(run)[0]

    for ranks in (2, 4):
        torch.testing.assert_close(train(ranks), train(1), rtol=1e-5, atol=1e-7)


def test_a_group_shares_as_a_world_does() -> None:
    def run(world: World) -> list[int]:
        groups = [world.new_group([0, 2]), world.new_group([1, 3])]
        return list(ax.DistributedSampler(range(8), groups[world.rank % 2]))

    taken = World.mock(4).run(run)
    assert taken[0] == taken[1]
    assert sorted(taken[0] + taken[2]) == list(range(8))


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        (0, {}, "2 ranks can't share a dataset of 0 samples; use more samples"),
        (1, {"drop_last": True}, "of 1 samples; use more samples, or drop_last=False"),
        (4, {"batch_size": 0}, "batch_size=0: use 1 or more samples"),
    ],
)
def test_indivisible_batch_is_refused_by_sampler(
    samples: int, options: dict[str, int], message: str
) -> None:
    def run(world: World) -> None:
        with pytest.raises(ValueError, match=message):
            ax.DistributedSampler(range(samples), world, **options)  # type: ignore[arg-type]

    World.mock(2).run(run)
