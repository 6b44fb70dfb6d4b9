"""All private names of torch that data parallelism uses, and nothing else.

``tests/house/test_private_names.py`` checks each of them, ``tests/engines/test_ddp_internals.py``
the behavior of DDP's. If a torch release changes one, those tests report it, and only this file
has to change.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

# torch 2.13 renamed the argument and warns about the old name.
BUFFERS_KEYWORD = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class FixedBuckets(nn.parallel.DistributedDataParallel):
    """Torch's DDP with a constant bucket layout from the first backward on.

    Torch starts with one layout and changes it after the first backward, to the order in which
    gradients arrived. gloo and NCCL sum the ranks' values in an order that depends on an element's
    position in its bucket: (a + b) + c at one position, (b + c) + a at another. With 3 or more
    ranks, the first step after a resume would therefore be rounded differently from the same step
    of an uninterrupted run. This class always uses the layout that torch would choose for gradients
    in reverse order of the parameters, which is roughly their real order.
    """

    def __init__(self, module: nn.Module, *, ignored: Collection[str] = (), **options: Any) -> None:
        """Wrap a module.

        Args:
            module: The module, as for torch's DDP.
            ignored: Names of parameters and buffers that are not synchronized.
            options: Options of torch's DDP.
        """
        ignoring: Any = module  # untyped in torch
        ignoring._ddp_params_and_buffers_to_ignore = ignored
        super().__init__(module, **options)
        if self._rebuilds_buckets():
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def is_complete(self) -> bool:
        """Return whether the last backward filled every bucket with all of its gradients."""
        check: Any = self._check_reducer_finalized  # untyped in torch
        try:
            check()
        except RuntimeError:
            return False
        return True

    def _build_params_for_reducer(self) -> Any:
        build: Any = super()._build_params_for_reducer  # untyped in torch
        parameters, are_sparse = build()
        if self._rebuilds_buckets():
            return parameters[::-1], are_sparse[::-1]
        return parameters, are_sparse

    def _rebuilds_buckets(self) -> bool:
        return not self.find_unused_parameters


def call_after_backward(function: Callable[[], None]) -> None:
    """Register a function that autograd calls at the end of this thread's running backward."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(function)


def compile_blocks(blocks: Iterable[nn.Module], *, mode: str) -> None:
    """Compile the forward of blocks. The hooks of ``fully_shard`` on a module call can't be."""
    import torch._dynamo.config

    # The compiler splits a model at the boundaries of DDP buckets, but its blocks are small enough.
    torch._dynamo.config.optimize_ddp = False
    hide_working_folder()
    for block in blocks:
        block.forward = torch.compile(block.forward, mode=mode)


@functools.cache
def hide_working_folder() -> None:
    """Keep the compiler's programs from importing modules of the working folder as libraries.

    It runs ``python -c "from ctypes ..."``, in any step. Other new processes, which the user's code
    may start, are not affected.
    """
    from torch._inductor import cpu_vec_isa

    environment = cpu_vec_isa.python_subprocess_env
    compiler: Any = cpu_vec_isa
    compiler.python_subprocess_env = lambda: {**environment(), "PYTHONSAFEPATH": "1"}


def fsdp_parameters(module: FSDPModule) -> Iterable[Any]:
    """Return ``fully_shard``'s records of a unit's parameters."""
    state: Any = module._get_fsdp_state()
    group = state._fsdp_param_group
    return () if group is None else group.fsdp_params


def reduce_gradients_to(module: FSDPModule, dtype: torch.dtype) -> None:
    """Give a unit's sharded gradients a dtype, in which they are added up, not the parameters'.

    ``fully_shard`` decides it in the first forward, by the dtype of the parameters.
    """
    state: Any = module._get_fsdp_state()
    group = state._fsdp_param_group
    if group is None:
        return
    decide = group._init_mp_dtypes

    def decide_gradients() -> None:
        decide()
        group._orig_dtype = dtype

    group._init_mp_dtypes = decide_gradients


def call_after_reduction(module: FSDPModule, function: Callable[[Any, list[Tensor]], None]) -> None:
    """Call a function after each reduction of a unit that began copies of gradients to the host.

    Args:
        module: A sharded unit.
        function: Receives the event after the copies, and the parameters whose gradients are being
            copied. It is not called for gradients that backward waits for.
    """
    state: Any = module._get_fsdp_state()
    group = state._fsdp_param_group
    if group is None:
        return
    reduce = group.post_backward

    def reduce_and_call(*unused: Any) -> None:
        reduce(*unused)
        copied = [each for each in group.fsdp_params if each.grad_offload_event is not None]
        if copied:
            function(copied[-1].grad_offload_event, [each.sharded_param for each in copied])

    group.post_backward = reduce_and_call


def number_of_changes(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return tensor._version


def add_up_gathered_gradients(module: nn.Module) -> None:
    """Add gradients of gathered parameters to their sum in the dtype of reduction.

    ``fully_shard`` does so in hooks of a backward, which a schedule skips if it computes weight
    gradients separately: those of all micro-batches would be added up in 16 bits.

    Args:
        module: A module with any number of sharded units.
    """
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            for parameter in fsdp_parameters(unit):
                if whole_parameter(parameter) is not None:
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def ignored_names(module: nn.Module) -> set[str]:
    """Return the names that a module excludes from torch's DDP."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def whole_parameter(parameter: Any) -> Any:
    """Return the unsharded tensor of an ``fsdp_parameters`` record; None if never gathered."""
    return getattr(parameter, "_unsharded_param", None)
