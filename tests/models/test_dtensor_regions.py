import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from axonlaunch.comm import World
from axonlaunch.engines.tensor.parallelize import parallelize
from axonlaunch.models.tensors.dtensor_regions import full_tensor, local_boxes


def test_dtensor_regions_equal_torch():
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
            [box] = local_boxes(tensor)
            assert tuple(length for _, length in box.region) == tuple(size)
            for (start, length), expected in zip(box.region, offset, strict=True):
                assert length == 0 or start == expected

    World.mock(6).run(rank)


def test_regions_of_partial_sums_are_refused():
    def rank(world: World) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        tensor = DTensor.from_local(torch.zeros(4, 2), mesh, [Partial(), Replicate()])
        with pytest.raises(NotImplementedError):
            local_boxes(tensor)

    World.mock(4).run(rank)


def test_packed_pieces_are_sharded_separately():
    """A weight has three pieces [24, 4]; two tensor ranks have rows of each, divided by data
    ranks.
    """
    numbers = torch.arange(96.0).view(24, 4)

    def rank(world: World) -> list[tuple[int, int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module = nn.Sequential(nn.Linear(4, 24, bias=False), nn.Linear(24, 4))
        module[0].weight = nn.Parameter(numbers.clone())
        plan = {"0": "packed_column/3", "1": "replicated"}
        parallelize(module, plan, mesh=mesh["tp"])
        fully_shard(module, mesh=mesh["dp"])
        weight = module[0].weight.detach()
        for box in local_boxes(weight):
            start, length = box.region[0]
            assert torch.equal(box.view(weight.to_local()), numbers[start : start + length])
        assert torch.equal(full_tensor(weight), numbers)
        return [box.region[0] for box in local_boxes(weight)]

    # In ranks' order the tensor axis is the inner one.
    assert World.mock(4).run(rank) == [
        [(0, 4), (8, 2)],
        [(4, 4), (12, 2)],
        [(10, 2), (16, 4)],
        [(14, 2), (20, 4)],
    ]
