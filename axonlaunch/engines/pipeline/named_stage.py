"""A torch pipeline stage that names its actions for profilers, as in ``axonlaunch pipeline 2F0``.

Some of torch's schedules name actions too, but together with the messages they wait for. Here each
name covers only the computation, in every schedule.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import pipelining
from torch.profiler import record_function

from axonlaunch.engines.data_parallel.torch_internals import add_up_gathered_gradients
from axonlaunch.engines.expert.routing import InvalidRouteError

PREFIX = "axonlaunch pipeline "
"""Prefix of stage, kind and micro-batch; read by ``diagnostics.pipeline_actions``."""


class NamedStage(pipelining.PipelineStage):
    """A torch pipeline stage with named actions."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return the messages that connect this rank to its neighbors.

        In torch 2.11, the rank at the turn of a V-shaped schedule also sends them to itself, which
        gloo does not support. Those are removed.
        """
        operations = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.group_peer != self.group_rank]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch's forward."""
        with record_function(f"{PREFIX}{self.stage_index}F{fwd_chunk_id}"):
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            except RuntimeError as error:
                # torch wraps the exception of the module.
                for raised in (error, error.__cause__):
                    if isinstance(raised, InvalidRouteError):
                        raised.micro_batch = fwd_chunk_id
                raise

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: Any = False,
    ) -> Any:
        """Run a micro-batch's full backward, or only its input gradients."""
        kind = "B" if full_backward else "I"
        with record_function(f"{PREFIX}{self.stage_index}{kind}{bwd_chunk_id}"):
            return super().backward_one_chunk(
                bwd_chunk_id, loss, full_backward=full_backward, last_backward=last_backward
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Compute a micro-batch's weight gradients."""
        with record_function(f"{PREFIX}{self.stage_index}W{bwd_chunk_id}"):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            add_up_gathered_gradients(self.submod)
