"""Computes memory statistics of a pipeline from its schedule and its traced micro-batch."""

from __future__ import annotations

from axonlaunch.engines.pipeline.schedule import PipelineSchedule
from axonlaunch.engines.pipeline.timeline import PipelineMemoryStats
from axonlaunch.planning.records import Estimate


def pipeline_stats(estimate: Estimate, schedule: PipelineSchedule) -> PipelineMemoryStats:
    """Return the memory statistics of a schedule, with the activation bytes of each stage.

    Args:
        estimate: Estimate of the run, for every position on its pp axis.
        schedule: Schedule of the run.
    """
    bytes_by_stage: dict[int, int] = {}
    for pp_rank, rank in enumerate(estimate.ranks):
        bytes_by_stage |= zip(schedule.stages_of(pp_rank), rank.microbatch_bytes, strict=True)
    return PipelineMemoryStats.from_schedule(
        schedule, [bytes_by_stage[stage] for stage in range(schedule.num_stages)]
    )
