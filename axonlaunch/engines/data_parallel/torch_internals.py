"""The private names of torch that data parallelism stands on: all of them, and nothing else.

``tests/house/test_private_names.py`` pins each, ``tests/engines/test_ddp_internals.py`` what torch
does with DDP's. When torch moves one, they say which, and the fix belongs in this file alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

# torch 2.13 renamed the argument, and warns of the old name.
BUFFERS_KEYWORD = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class FixedBuckets(nn.parallel.DistributedDataParallel):
    """Torch's DDP with one layout of buckets from the first backward to the last.

    Torch starts with one layout, and after the first backward changes to another, in the order in
    which gradients came. gloo and NCCL add the ranks' values in an order that depends on where an
    element lies in its bucket: (a + b) + c in one place, (b + c) + a in another. So on 3 or more
    ranks the first step after a resume would round otherwise than the same step of a run that was
    never stopped. Here both have the layout that torch makes of gradients that come in reverse
    order of the parameters, which is about how they do.
    """

    def __init__(self, module: nn.Module, *, ignored: Collection[str] = (), **options: Any) -> None:
        """Wrap a module.

        Args:
            module: What torch's takes.
            ignored: Names of parameters and buffers that the ranks do not agree on.
            options: Torch's own.
        """
        ignoring: Any = module  # torch has not typed it
        ignoring._ddp_params_and_buffers_to_ignore = ignored
        super().__init__(module, **options)
        if self._may_change():
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def is_complete(self) -> bool:
        """Say whether the last backward gave every bucket all of its gradients."""
        check: Any = self._check_reducer_finalized  # torch has not typed it
        try:
            check()
        except RuntimeError:
            return False
        return True

    def _build_params_for_reducer(self) -> Any:
        build: Any = super()._build_params_for_reducer  # torch has not typed it
        parameters, are_sparse = build()
        if self._may_change():
            return parameters[::-1], are_sparse[::-1]
        return parameters, are_sparse

    def _may_change(self) -> bool:
        return not self.find_unused_parameters


def call_after_backward(function: Callable[[], None]) -> None:
    """Let autograd call a function at the end of the backward that runs in this thread."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(function)


def compile_blocks_whole() -> None:
    """Keep the compiler from cutting a block where one of DDP's buckets ends.

    It has a reason to for a whole model, not for blocks.
    """
    import torch._dynamo.config

    torch._dynamo.config.optimize_ddp = False


def fsdp_parameters(module: FSDPModule) -> Iterable[Any]:
    """Return what ``fully_shard`` holds of each parameter of its unit."""
    state: Any = module._get_fsdp_state()
    group = state._fsdp_param_group
    return () if group is None else group.fsdp_params


def ignored_names(module: nn.Module) -> set[str]:
    """Return the names that a module keeps from torch's DDP."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def whole_parameter(parameter: Any) -> Any:
    """Return the whole of one of ``fsdp_parameters``; None where it was never gathered."""
    return getattr(parameter, "_unsharded_param", None)
