"""Averages gradients over ranks for a model that is replicated on every rank.

To overlap this with the backward, or for sharded gradients, use an engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonlaunch.comm.averaging.gradient_bucket import BUCKET_BYTES, GradientBucket, buckets
from axonlaunch.comm.backend import ReduceOp
from axonlaunch.comm.checks.argument_checks import device_of, reduce_op_error, tensor_error
from axonlaunch.comm.checks.mismatch_check import check_collective
from axonlaunch.comm.collectives import group_or_default, reduce_values
from axonlaunch.comm.errors import format_tensor
from axonlaunch.comm.process_group import ProcessGroup


def sync_gradient(tensor: Tensor, *, group: ProcessGroup | None = None) -> None:
    """Average ``tensor.grad`` [*tensor.shape] over ranks in place.

    A missing gradient counts as zeros. Raises the errors of ``sync_gradients``.
    """
    sync_gradients([tensor], group=group)


def sync_gradients(
    parameters: nn.Module | Iterable[Tensor], *, group: ProcessGroup | None = None
) -> None:
    """Average the gradients of a module or of given parameters over ranks in place.

    A parameter without a gradient on this rank, but with one on another rank, counts as zeros and
    gets the average. A parameter without a gradient on any rank gets none. So ranks can use
    different parts of a model and still stay equal.

    Raises:
        TypeError: A gradient is sparse or a DTensor, or the mean is undefined for its dtype.
        ValueError: This rank is not in the group, or a gradient is on a device that the group does
            not support.
        MismatchError: Parameters differ between ranks.
    """
    group = group_or_default(group)
    members = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    tensors = [t for t in dict.fromkeys(members) if t.requires_grad]
    shapes = "\n".join(map(format_tensor, tensors))
    digest = hashlib.sha256(shapes.encode()).hexdigest()[:8]
    check_collective(
        group,
        f"sync_gradients of {len(tensors)} parameters with {sum(t.numel() for t in tensors)} "
        f"elements (their shapes and dtypes: {digest})",
        problem=_first_problem(tensors, group),
    )
    if not tensors or group.size == 1:
        return
    has_grad = torch.tensor(
        [tensor.grad is not None for tensor in tensors], dtype=torch.int32, device=device_of(group)
    )
    dist.all_reduce(has_grad, op=dist.ReduceOp.MAX, group=group.torch_group)
    used = [t for t, has in zip(tensors, has_grad.tolist(), strict=True) if has]
    for bucketed in buckets(used, limit=BUCKET_BYTES):
        gradients = [_grad(tensor) for tensor in bucketed]
        bucket = GradientBucket(sum(gradient.numel() for gradient in gradients))
        bucket.add_all(gradients)
        bucket.data.copy_(reduce_values(bucket.data, ReduceOp.Average, group))
        torch._foreach_copy_(gradients, bucket.extract())


def _grad(tensor: Tensor) -> Tensor:
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor)
    return tensor.grad.detach()


def _first_problem(tensors: list[Tensor], group: ProcessGroup) -> Exception | None:
    for index, tensor in enumerate(tensors):
        value = tensor if tensor.grad is None else tensor.grad
        problem = tensor_error(value, group) or reduce_op_error(value, ReduceOp.Average)
        if problem is not None:
            return type(problem)(
                f"sync_gradients: parameter {index} ({format_tensor(tensor)}): {problem}"
            )
    return None
