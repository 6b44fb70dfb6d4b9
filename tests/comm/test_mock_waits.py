"""Asynchronous operations of the mock world: results are available after waiting."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from axonlaunch.comm import World

# torch 2.13 renames half of these.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_asynchronous_work_can_be_waited_for_in_any_order() -> None:
    def use(world: World) -> None:
        tensors = [torch.full((2,), float(n)) for n in range(4)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in reversed(works):
            work.wait()
            assert work.is_completed()
        assert [tensor[0].item() for tensor in tensors] == [0, 4, 8, 12]
        work = dist.all_reduce(tensors[0], async_op=True)
        assert work.get_future().wait()[0] is tensors[0]
        work = dist.all_reduce(tensors[1], async_op=True)
        while not work.is_completed():
            pass
        assert tensors[1][0].item() == 16

    World.mock(4, timeout_s=20).run(use)


def test_async_result_is_available_only_after_wait() -> None:
    def use(world: World) -> None:
        rank, mine = world.rank, torch.full((2,), float(world.rank + 1))
        both = torch.full((4,), float(rank + 1))
        outputs = {
            "all_reduce": mine.clone(),
            "reduce": mine.clone(),
            "broadcast": mine.clone(),
            **{name: torch.full((4,), -1.0) for name in ("gather", "gather_list", "to_all")},
            **{name: torch.full((2,), -1.0) for name in ("reduce_scatter", "scatter", "receive")},
        }
        unfinished = {name: output.clone() for name, output in outputs.items()}
        halves = list(outputs["gather_list"].split(2))
        parts = list(both.split(2)) if rank == 0 else None
        works = [
            dist.all_reduce(outputs["all_reduce"], async_op=True),
            dist.reduce(outputs["reduce"], 1, async_op=True),
            dist.broadcast(outputs["broadcast"], 0, async_op=True),
            dist.all_gather_into_tensor(outputs["gather"], mine, async_op=True),
            dist.all_gather(halves, mine, async_op=True),
            dist.all_to_all_single(outputs["to_all"], both, async_op=True),
            dist.reduce_scatter_tensor(outputs["reduce_scatter"], both, async_op=True),
            dist.scatter(outputs["scatter"], parts, 0, async_op=True),
            dist.irecv(outputs["receive"], 1 - rank),
        ]
        functional_sum = functional.all_reduce(mine, "sum", dist.group.WORLD)
        dist.send(mine, 1 - rank) if rank else dist.isend(mine, 1).wait()
        dist.barrier()
        mine.zero_(), both.zero_()  # the sent data has been read
        for name, output in outputs.items():
            assert torch.equal(output, unfinished[name]), name
        for work in works:
            work.wait()
        assert functional_sum.tolist() == [3, 3]
        assert {name: output.tolist() for name, output in outputs.items()} == {
            "all_reduce": [3, 3],
            "reduce": [3, 3] if rank == 1 else [1, 1],
            "broadcast": [1, 1],
            **{key: [1, 1, 2, 2] for key in ("gather", "gather_list", "to_all")},
            "reduce_scatter": [3, 3],
            "scatter": [1, 1],
            "receive": [2 - rank] * 2,
        }

    World.mock(2, timeout_s=20).run(use)
