import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from axonlaunch.comm import World
from axonlaunch.models.dtensor_regions import local_region


def test_regions_are_torchs_own():
    placements = [
        list(pair) for pair in itertools.product([Shard(0), Shard(1), Replicate()], repeat=2)
    ]

    def rank(world: World) -> None:
        mesh = init_device_mesh("cpu", (2, 3))
        for shape, placed in itertools.product([(12, 6), (7, 5), (2, 1)], placements):
            size, offset = compute_local_shape_and_global_offset(shape, mesh, placed)
            tensor = DTensor.from_local(
                torch.zeros(size), mesh, placed, run_check=False, shape=shape, stride=(shape[1], 1)
            )
            region = local_region(tensor)
            assert tuple(length for _, length in region) == tuple(size)
            for (start, length), expected in zip(region, offset, strict=True):
                assert length == 0 or start == expected

    World.mock(6).run(rank)


def test_what_is_no_box_is_refused():
    def rank(world: World) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for placed in ([_StridedShard(0, split_factor=4), Replicate()], [Partial(), Replicate()]):
            tensor = DTensor.from_local(
                torch.zeros(4, 2), mesh, placed, run_check=False, shape=(8, 2), stride=(2, 1)
            )
            with pytest.raises(NotImplementedError):
                local_region(tensor)

    World.mock(4).run(rank)
