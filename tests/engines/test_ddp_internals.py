"""Private names of torch's DDP that keep one layout of buckets from the first backward on.

A failure here means that torch has moved one. The fix belongs in ``FixedBuckets`` of
``engines/data_parallel/ddp.py``: look in ``torch/nn/parallel/distributed.py`` for the construction
of the reducer's parameters and in ``torch/csrc/distributed/c10d/reducer.cpp`` for the code that
rebuilds buckets after the first backward. If torch no longer rebuilds them, delete ``FixedBuckets``
and use ``DistributedDataParallel`` itself; then raise the upper bound on torch in
``pyproject.toml``.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import axonlaunch as ax
from axonlaunch.engines.data_parallel.torch_internals import FixedBuckets

Layout = list[list[torch.Size]]


@pytest.mark.parametrize("name", ["_push_all_rebuilt_params", "_rebuild_buckets"])
def test_torch_reducer_has_private_names(name: str) -> None:
    assert callable(getattr(dist.Reducer, name))


def test_torch_ddp_subclass_can_reorder_reducer_parameters() -> None:
    assert "self._build_params_for_reducer()" in inspect.getsource(DistributedDataParallel)
    returned = inspect.getsource(DistributedDataParallel._build_params_for_reducer)
    assert "return parameters, expect_sparse_gradient" in returned


def layouts(kind: type[DistributedDataParallel]) -> list[Layout]:
    """Return the shapes in each bucket for three steps of a module whose layers run in definition
    order.
    """

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(8, 8)
            self.middle = nn.Linear(8, 16)
            self.first = nn.Linear(4, 8)

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.middle(self.last(self.first(inputs)))

    def run(world: ax.World) -> list[Layout]:
        module = kind(Crossed(), process_group=world.default_group.torch_group, bucket_cap_mb=3e-4)
        steps: list[Layout] = []

        def note(state: object, bucket: Any) -> Any:
            steps[-1].append([parameter.shape for parameter in bucket.parameters()])
            done: Any = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        # torch compares annotations, which are strings here; a lambda has none.
        module.register_comm_hook(None, lambda state, bucket: note(state, bucket))
        for _ in range(3):
            steps.append([])
            module(torch.ones(2, 4)).sum().backward()
        return steps

    return ax.World.mock(2).run(run)[0]


def test_ddp_buckets_of_first_backward_equal_later_ones() -> None:
    first, second, third = layouts(FixedBuckets)
    assert first == second == third
    assert len(first) > 1


def test_torch_ddp_rebuilds_buckets_after_first_backward() -> None:
    first, second, third = layouts(DistributedDataParallel)
    assert first != second == third
