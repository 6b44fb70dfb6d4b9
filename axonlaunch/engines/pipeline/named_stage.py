"""torch's pipeline stage, whose actions a profiler shows by name: ``axonlaunch pipeline 2F0``.

torch names them in some of its schedules, together with the messages that they wait for; here each
is its computation alone, under every schedule.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import pipelining
from torch.profiler import record_function

PREFIX = "axonlaunch pipeline "
"""Followed by stage, kind and micro-batch, as ``diagnostics.pipeline_actions`` reads them."""


class NamedStage(pipelining.PipelineStage):
    """A stage that does what torch's does."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return messages that connect this rank to its neighbours.

        By torch 2.11 a rank where a V turns sends them to itself too, which gloo can't.
        """
        operations = super()._get_init_p2p_neighbors_ops()
        return [each for each in operations if each.group_peer != self.group_rank]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch's forward."""
        with record_function(f"{PREFIX}{self.stage_index}F{fwd_chunk_id}"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: Any = False,
    ) -> Any:
        """Run a micro-batch's backward, or that of its inputs alone."""
        kind = "B" if full_backward else "I"
        with record_function(f"{PREFIX}{self.stage_index}{kind}{bwd_chunk_id}"):
            return super().backward_one_chunk(
                bwd_chunk_id, loss, full_backward=full_backward, last_backward=last_backward
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the rest of a micro-batch's backward."""
        with record_function(f"{PREFIX}{self.stage_index}W{bwd_chunk_id}"):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
