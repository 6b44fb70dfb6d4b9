"""Invalid collective calls raise on every rank of every backend, and the world stays usable."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from axonlaunch import comm
from axonlaunch.comm import MismatchError, World
from support.collective_values import (
    check,
)


@check
def shapes_that_differ_are_an_error_everywhere(world: World) -> None:
    odd = torch.zeros(3 if world.rank == 1 else 4)
    for call in (
        comm.all_reduce_sum,
        comm.all_reduce_mean,
        comm.broadcast,
        comm.all_gather,
        comm.gather_tensor,
    ):
        with pytest.raises(
            MismatchError, match=r"ranks 0, 2: \w+.* of float32 \[4\]; rank 1: .* \[3\]"
        ):
            call(odd)
    with pytest.raises(MismatchError, match=r"float32 \[3, 2\]; rank 1: .* \[3, 1\]"):
        comm.reduce_scatter_sum(torch.zeros(3, 1 if world.rank == 1 else 2))
    comm.barrier()


@check
def dtypes_that_differ_are_an_error_everywhere(world: World) -> None:
    odd = torch.zeros(4, dtype=torch.float64 if world.rank == 2 else torch.float32)
    with pytest.raises(MismatchError, match=r"ranks 0, 1: .* float32 \[4\]; rank 2: .* float64"):
        comm.all_reduce_max(odd)
    comm.barrier()


@check
def operations_that_differ_are_an_error_everywhere(world: World) -> None:
    call = comm.all_reduce_sum if world.rank else comm.all_gather
    with pytest.raises(MismatchError, match=r"rank 0: all_gather of .*; ranks 1, 2: all_reduce_s"):
        call(torch.zeros(4))
    call = comm.all_reduce_sum if world.rank else comm.all_reduce_max
    with pytest.raises(MismatchError, match="make the same calls in the same order"):
        call(torch.zeros(4))
    with pytest.raises(MismatchError, match="rank 2: barrier"):
        comm.barrier() if world.rank == 2 else comm.all_gather(torch.zeros(4))


@check
def sources_that_differ_are_an_error_everywhere(world: World) -> None:
    with pytest.raises(MismatchError, match=r"broadcast from rank 0 .*broadcast from rank 1"):
        comm.broadcast_from(torch.zeros(2), src=1 if world.rank == 2 else 0)
    with pytest.raises(MismatchError, match="gather_tensor to rank 2"):
        comm.gather_tensor(torch.zeros(2), dst=world.rank)
    with pytest.raises(MismatchError, match="scatter_tensor from rank 1"):
        comm.scatter_tensor(None if world.rank == 2 else torch.zeros(3), src=min(world.rank, 1))


@check
def a_problem_of_one_rank_is_raised_on_all(world: World) -> None:
    mine, of_others = (TypeError, "a mean of int64"), (MismatchError, "rank 1 refused its call: ")
    kind, text = mine if world.rank == 1 else of_others
    with pytest.raises(kind, match=text):
        comm.all_reduce_mean(torch.zeros(2, dtype=torch.int64 if world.rank == 1 else None))
    kind = ValueError if world.rank == 0 else MismatchError
    with pytest.raises(kind, match=r"dim 0 of the shape \[4\] can't be sharded over 3 ranks"):
        comm.scatter_tensor(torch.zeros(4) if world.rank == 0 else None)
    kind = ValueError if world.rank == 2 else MismatchError
    with pytest.raises(kind, match="only rank 0 passes a tensor, rank 2 must pass None"):
        comm.scatter_tensor(torch.zeros(3) if world.rank != 1 else None)
    with pytest.raises((TypeError, MismatchError), match="expected a tensor, got NoneType"):
        comm.scatter_tensor(None)
    kind = TypeError if world.rank == 0 else MismatchError
    with pytest.raises(kind, match=r"pass tensor.to_dense\(\)"):
        comm.broadcast(torch.eye(2).to_sparse() if world.rank == 0 else torch.eye(2))
    comm.barrier()


@check
def messages_that_do_not_fit_are_an_error_at_both_ends(world: World) -> None:
    if world.rank == 0:
        with pytest.raises(MismatchError, match=r"0 calls send with float32 \[3\], but rank 1"):
            comm.send(torch.zeros(3), dst=1)
        with pytest.raises(MismatchError, match="ranks 0 and 1 both send"):
            comm.send(torch.zeros(3), dst=1)
        with pytest.raises(ValueError, match="send: the tensor is on meta"):
            comm.send(torch.zeros(3, device="meta"), dst=1)
    elif world.rank == 1:
        with pytest.raises(MismatchError, match=r"rank 0 calls send with float32 \[3\]: give"):
            comm.recv(torch.zeros(3, dtype=torch.float64), src=0)
        with pytest.raises(MismatchError, match="ranks 1 and 0 both send"):
            comm.send(torch.zeros(3), dst=0)
        with pytest.raises(MismatchError, match="rank 0 refused its call: send: the tensor is on"):
            comm.recv(torch.zeros(3), src=0)
    comm.barrier()


@check
def arguments_that_make_no_sense_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match=r"src=7 is not in the group \[0, 1, 2\]"):
        comm.broadcast_from(torch.zeros(2), src=7)
    with pytest.raises(ValueError, match="dst=-1 is not in the group"):
        comm.gather_tensor(torch.zeros(2), dst=-1)
    with pytest.raises(ValueError, match=f"dst={world.rank} is this rank itself"):
        comm.send(torch.zeros(2), dst=world.rank)
    with pytest.raises(ValueError, match="src=3 is not in the group"):
        comm.recv(torch.zeros(2), src=3)
    with pytest.raises(ValueError, match=r"dim 0 of the shape \[4, 2\] can't be sharded over 3"):
        comm.reduce_scatter_sum(torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"dim 0 of the shape \[\] can't be sharded"):
        comm.reduce_scatter_mean(torch.zeros(()))
    with pytest.raises(TypeError, match="all_reduce_sum: a sum of bool is not a bool: count with"):
        comm.all_reduce_sum(torch.zeros(2, dtype=torch.bool))
    with pytest.raises(TypeError, match="complex64 supports only sum and mean"):
        comm.all_reduce_max(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="float8_e4m3fn can't be reduced: convert"):
        comm.all_reduce_sum(torch.zeros(2, dtype=torch.float8_e4m3fn))
    with pytest.raises(TypeError, match="expected a tensor, got list"):
        comm.all_gather([1.0])
    with pytest.raises(ValueError, match=r"is on meta, but the group's backend .* works on cpu"):
        comm.all_reduce_sum(torch.zeros(2, device="meta"))
    with pytest.raises(ValueError, match="the tensor is expanded"):
        comm.all_reduce_sum(torch.zeros(1).expand(4))
    with pytest.raises(TypeError, match=r"ProcessGroup.from_torch\(group\)"):
        comm.barrier(dist.group.WORLD)
    comm.barrier()


@check
def groups_that_make_no_sense_are_refused(world: World) -> None:
    for ranks, text in (
        ([], "at least one rank"),
        ([0, 3], "the world has ranks 0 to 2"),
        ([-1], "the world has ranks 0 to 2"),
        ([1, 1], "a rank can be in a group once"),
    ):
        with pytest.raises(ValueError, match=text):
            world.new_group(ranks)
    with pytest.raises(MismatchError, match=r"new_group of ranks \[0, 1\].* of ranks \[0, 2\]"):
        world.new_group([0, 2] if world.rank == 2 else [0, 1])
    comm.barrier()


@check
def gradients_that_differ_are_an_error_everywhere(world: World) -> None:
    with pytest.raises(MismatchError, match="sync_gradients of 2 parameters with"):
        comm.sync_gradients(nn.Linear(2, 3 if world.rank == 1 else 4))
    kind = TypeError if world.rank == 0 else MismatchError
    model = nn.Embedding(4, 2, sparse=world.rank == 0)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(kind, match=r"parameter 0 \(float32 \[4, 2\]\): .*to_dense"):
        comm.sync_gradients(model)
    comm.barrier()
