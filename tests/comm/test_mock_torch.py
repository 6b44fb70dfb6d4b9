"""``torch.distributed`` on the mock world: calls that the engines and torch make directly."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from axonlaunch.comm import CommError, MismatchError, RankFailedError, World


def run(fn: Callable[[World], Any], *, size: int = 4) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames half of these
        return World.mock(size, timeout_s=20).run(fn)


def mine(world: World, count: int = 2) -> Tensor:
    return torch.arange(count, dtype=torch.float32) + 10 * world.rank


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, 10.0),
        (dist.ReduceOp.AVG, 2.5),
        (dist.ReduceOp.PRODUCT, 24.0),
        (dist.ReduceOp.MIN, 1.0),
        (dist.ReduceOp.MAX, 4.0),
    ],
)
def test_mock_all_reduce_supports_every_reduction(op: Any, expected: float) -> None:
    def reduce(world: World) -> list[list[float]]:
        value = float(world.rank + 1)
        everywhere, on_one = torch.full((2,), value), torch.full((2,), value)
        dist.all_reduce(everywhere, op=op)
        dist.reduce(on_one, 2, op=op)
        part = torch.zeros(2)
        dist.reduce_scatter_tensor(part, torch.full((8,), value), op=op)
        scattered = torch.zeros(2)
        dist.reduce_scatter(scattered, [torch.full((2,), value)] * 4, op=op)
        return [everywhere.tolist(), on_one.tolist(), part.tolist(), scattered.tolist()]

    for rank, (everywhere, on_one, part, scattered) in enumerate(run(reduce)):
        assert everywhere == part == scattered == [expected] * 2
        assert on_one == [expected if rank == 2 else float(rank + 1)] * 2


@pytest.mark.parametrize(
    ("op", "expected"),
    [(dist.ReduceOp.BAND, 0), (dist.ReduceOp.BOR, 7), (dist.ReduceOp.BXOR, 4)],
)
def test_mock_all_reduce_supports_bitwise_reductions(op: Any, expected: int) -> None:
    def reduce(world: World) -> int:
        tensor = torch.tensor([world.rank + 1])
        dist.all_reduce(tensor, op=op)
        return int(tensor.item())

    assert run(reduce) == [expected] * 4


def test_a_scaled_sum_is_refused_as_on_gloo() -> None:
    def reduce(world: World) -> None:
        dist.all_reduce(torch.ones(1), op=dist._make_nccl_premul_sum(0.5))

    with pytest.raises(RankFailedError, match="mock, like gloo, has no PREMUL_SUM: use SUM"):
        run(reduce)


def test_mock_gathers_and_scatters() -> None:
    def move(world: World) -> None:
        size, rank = world.world_size, world.rank
        gathered = [torch.zeros(2) for _ in range(size)]
        dist.all_gather(gathered, mine(world))
        assert [part[0].item() for part in gathered] == [0, 10, 20, 30]
        full = torch.zeros(size, 2)
        dist.all_gather_into_tensor(full, mine(world))
        assert full[:, 1].tolist() == [1, 11, 21, 31]
        full = torch.zeros(2 * size)
        full[2 * rank : 2 * rank + 2] = mine(world)
        dist.all_gather_into_tensor(full, full[2 * rank : 2 * rank + 2])
        assert full[::2].tolist() == [0, 10, 20, 30]
        dist.gather(mine(world), gathered if rank == 3 else None, dst=3)
        mixed = torch.zeros(2)
        sources = [torch.full((2,), float(to)) for to in range(size)]
        dist.scatter(mixed, sources if rank == 1 else None, src=1)
        assert mixed.tolist() == [rank] * 2

    run(move)


def test_all_to_all_with_even_and_uneven_parts() -> None:
    def exchange(world: World) -> None:
        size, rank = world.world_size, world.rank
        received = [torch.zeros(to + 1) for to in range(size)]
        sent = [torch.full((rank + 1,), float(10 * rank + to)) for to in range(size)]
        dist.all_to_all(received, sent)
        assert [part[0].item() for part in received] == [10 * fr + rank for fr in range(size)]
        even = torch.zeros(size)
        dist.all_to_all_single(even, torch.arange(float(size)) + 10 * rank)
        assert even.tolist() == [10 * fr + rank for fr in range(size)]
        uneven = torch.zeros(sum(range(1, size + 1)))
        dist.all_to_all_single(
            uneven,
            torch.full((size * (rank + 1),), float(rank)),
            output_split_sizes=list(range(1, size + 1)),
            input_split_sizes=[rank + 1] * size,
        )
        assert uneven.tolist() == [float(fr) for fr in range(size) for _ in range(fr + 1)]

    run(exchange)


def test_parts_that_do_not_fit_are_an_error_on_every_rank() -> None:
    def exchange(world: World) -> None:
        with pytest.raises(CommError, match=r"does not fit the result float32 \[2\]"):
            dist.all_to_all([torch.zeros(1)] * 2, [torch.zeros(2)] * 2)
        with pytest.raises(CommError, match=r"the output float32 \[3\] does not fit"):
            dist.all_gather([torch.zeros(3)] * 2, torch.zeros(2))

    run(exchange, size=2)


def test_coalesced_collectives() -> None:
    def coalesce(world: World) -> None:
        size = world.world_size
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            for scale in (1.0, 2.0):
                dist.all_reduce(torch.full((2,), scale))
        manager.wait()
        tensors = [torch.full((2,), 1.0), torch.full((3,), 2.0)]
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        assert [t[0].item() for t in tensors] == [4.0, 8.0]
        full_tensors = [torch.zeros(size), torch.zeros(2 * size)]
        with dist._coalescing_manager():
            for full, count in zip(full_tensors, (1, 2), strict=True):
                dist.all_gather_into_tensor(full, mine(world, count))
        assert full_tensors[1].tolist() == [0, 1, 10, 11, 20, 21, 30, 31]
        reduced = [torch.zeros(1), torch.zeros(2)]
        with dist._coalescing_manager():
            for part, count in zip(reduced, (1, 2), strict=True):
                dist.reduce_scatter_tensor(part, torch.ones(count * size))
        assert [part[0].item() for part in reduced] == [4.0, 4.0]
        lists = [[torch.zeros(1), torch.zeros(2)] for _ in range(size)]
        dist.all_gather_coalesced(lists, [mine(world, 1), mine(world, 2)])
        assert lists[2][1].tolist() == [20, 21]

    run(coalesce)


def test_functional_collectives_as_dtensor_uses_them() -> None:
    def use(world: World) -> None:
        group, size = world.default_group.torch_group, world.world_size
        summed = functional.all_reduce(mine(world), "sum", group)
        assert (summed + 0).tolist() == [60.0, 64.0]
        full = functional.all_gather_tensor(mine(world), 0, group)
        assert full.tolist()[::2] == [0, 10, 20, 30]
        part = functional.reduce_scatter_tensor(torch.ones(2 * size), "avg", 0, group)
        assert (part + 0).tolist() == [1.0, 1.0]
        assert functional.broadcast(mine(world), 1, group).tolist() == [10.0, 11.0]
        swapped = functional.all_to_all_single(mine(world, size), None, None, group)
        assert swapped.tolist() == [10.0 * fr + world.rank for fr in range(size)]
        many = functional.all_reduce_coalesced([mine(world), mine(world, 1)], "max", group)
        assert [m.tolist() for m in many] == [[30.0, 31.0], [30.0]]
        many = functional.all_gather_into_tensor_coalesced([mine(world), mine(world, 1)], group)
        assert [m.tolist()[::size] for m in many] == [[0, 20], [0]]
        inputs = [torch.ones(size), torch.ones(2 * size)]
        many = functional.reduce_scatter_tensor_coalesced(inputs, "sum", [0, 0], group)
        assert [m.tolist() for m in many] == [[4.0], [4.0, 4.0]]

    run(use)


def test_functional_collectives_have_gradients() -> None:
    def use(world: World) -> list[float]:
        value = torch.full((2,), float(world.rank), requires_grad=True)
        full = functional.all_gather_tensor_autograd(value, 0, world.default_group.torch_group)
        (full * torch.arange(4.0)).sum().backward()
        assert value.grad is not None
        return value.grad.tolist()

    assert run(use, size=2) == [[0.0, 2.0], [4.0, 6.0]]


def test_mock_object_collectives() -> None:
    def use(world: World) -> None:
        size, rank = world.world_size, world.rank
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
        assert [entry["text"] for entry in objects] == ["", "x", "xx", "xxx"]
        gathered: list[Any] = [None] * size
        dist.gather_object(rank, gathered if rank == 1 else None, dst=1)
        assert gathered == ([0, 1, 2, 3] if rank == 1 else [None] * size)
        box = [rank, "same"]
        dist.broadcast_object_list(box, src=2)
        assert box == [2, "same"]
        scattered: list[Any] = [None]
        dist.scatter_object_list(scattered, list("abcd") if rank == 0 else None, src=0)
        assert scattered == ["abcd"[rank]]
        if rank == 0:
            dist.send_object_list([{"a": 1}], dst=3)
        if rank == 3:
            dist.recv_object_list(box[:1], src=0)

    run(use)


def test_mock_sends_and_receives_in_every_form() -> None:
    def use(world: World) -> None:
        rank, peer = world.rank, world.rank ^ 1
        received = [torch.zeros(2) for _ in range(4)]
        works = [dist.isend(mine(world) + n, peer, tag=n) for n in range(3)]
        works += [dist.irecv(received[n], peer, tag=n) for n in (2, 0, 1)]
        for work in works:
            assert work is not None
            work.wait()
            assert work.is_completed()
        assert [message[0].item() for message in received[:3]] == [10 * peer + n for n in range(3)]
        batch = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, received[0], peer),
                dist.P2POp(dist.isend, mine(world), peer),
                dist.P2POp(dist.irecv, received[1], peer),
                dist.P2POp(dist.isend, mine(world) + 5, peer),
            ]
        )
        for work in batch:
            work.wait()
        assert [message[0].item() for message in received[:2]] == [10 * peer, 10 * peer + 5]
        myself = dist.isend(mine(world), rank)
        assert myself is not None
        dist.irecv(received[3], rank).wait()
        assert received[3].tolist() == mine(world).tolist()

    run(use)


def test_receiving_from_any_rank_returns_source_in_send_order() -> None:
    def use(world: World) -> list[tuple[int, float]]:
        if world.rank:
            dist.send(mine(world), 0)
            return []
        senders = []
        for _ in range(3):
            buffer = torch.zeros(2)
            senders.append((dist.recv(buffer), buffer[0].item()))
        return senders

    assert run(use)[0] == [(1, 10.0), (2, 20.0), (3, 30.0)]


def test_a_message_of_another_size_is_an_error_at_both_ends() -> None:
    def use(world: World) -> None:
        call = dist.recv if world.rank else dist.send
        with pytest.raises(MismatchError, match=r"rank 0 sends float32 \[2\] to rank 1, which re"):
            call(torch.zeros(2 + world.rank), 1 - world.rank)

    run(use, size=2)


def test_a_wrong_order_of_operations_is_reported_in_plain_words() -> None:
    def use(world: World) -> None:
        if world.rank == 1:
            dist.barrier()
        else:
            dist.broadcast(torch.ones(3), 0)

    with pytest.raises(
        RankFailedError, match=r"rank 0: broadcast from rank 0 of float32 \[3\]; rank 1: barrier"
    ):
        run(use, size=2)


def test_collectives_of_different_groups_do_not_match() -> None:
    def use(world: World) -> list[float]:
        even, odd = world.new_group([0, 2]), world.new_group([1, 3])
        mine_of = odd if world.rank % 2 else even
        tensor = mine(world)
        dist.all_reduce(tensor, group=mine_of.torch_group)
        dist.broadcast(tensor, group_src=1, group=mine_of.torch_group)
        dist.destroy_process_group(mine_of.torch_group)
        dist.barrier()
        return tensor.tolist()

    assert run(use) == [[20.0, 22.0], [40.0, 42.0]] * 2


def test_device_meshes_of_two_and_three_dimensions() -> None:
    def use(world: World) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        sums = []
        for name in ("a", "b", "c"):
            tensor = torch.tensor([float(world.rank)])
            dist.all_reduce(tensor, group=mesh[name].get_group())
            sums.append(tensor.item())
        flat = mesh["a", "b"]._flatten("ab")
        tensor = torch.tensor([float(world.rank)])
        dist.all_reduce(tensor, group=flat.get_group())
        return [*sums, tensor.item()]

    expected = [
        [
            float(2 * (rank & 3) + 4),
            float(2 * (rank & 5) + 2),
            float(2 * (rank & 6) + 1),
            float(4 * (rank & 1) + 12),
        ]
        for rank in range(8)
    ]
    assert run(use, size=8) == expected


def test_mock_store_wait_yields_to_next_rank() -> None:
    def use(world: World) -> None:
        store = dist.distributed_c10d._get_default_store()
        if world.rank == 3:
            store.set("key", "value")
        assert store.get("key") == b"value"
        assert store.add("count", 1) >= 1
        store.wait(["key", "count"])
        assert store.check(["key"])
        assert store.compare_set("new", "", "1") == b"1"
        assert store.num_keys() >= 3
        dist.barrier()
        if world.rank == 0:
            assert store.get("count") == b"4"
            assert store.delete_key("count")

    run(use)


def test_waiting_for_unset_store_key_is_deadlock() -> None:
    with pytest.raises(RankFailedError, match=r"rank 0: store, waits for .*missing"):
        run(lambda _: dist.distributed_c10d._get_default_store().get("missing"), size=2)


def test_mock_collectives_do_not_bump_autograd_version() -> None:
    def use(world: World) -> float:
        weight = torch.ones(2, requires_grad=True)
        value = weight * 2
        loss = (value * value).sum()
        dist.broadcast(value.detach(), 0)  # as on gloo: no new version, so backward continues
        with torch.inference_mode():
            inference = torch.ones(2)
        dist.all_reduce(inference)
        loss.backward()
        assert weight.grad is not None
        return weight.grad[0].item()

    assert run(use, size=2) == [8.0, 8.0]
