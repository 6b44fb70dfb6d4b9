"""Computes the engines' memory statistics from an estimate.

Sharded parameters are measured with the same code as in a run. The activations of a pipeline follow
from its schedule and the traced bytes of one micro-batch.
"""

from __future__ import annotations

from axonlaunch.engines.data_parallel.fsdp_memory import FSDPMemoryStats
from axonlaunch.engines.pipeline.schedule import PipelineSchedule
from axonlaunch.engines.pipeline.timeline import PipelineMemoryStats
from axonlaunch.planning.records import Estimate, RankEstimate


def fsdp_stats(rank: RankEstimate) -> FSDPMemoryStats:
    """Return the expected ``FSDP.memory_stats`` of a rank after a step.

    ``device_peak_bytes`` covers all tensors, on a GPU or a CPU.

    Raises:
        ValueError: The rank has no sharded parameters.
    """
    stats = rank.sharded_parameters
    if stats is None:
        raise ValueError("no parameters are sharded; use strategy=fsdp")
    return FSDPMemoryStats.of(
        stats["current_bytes"], stats["peak_bytes"], stats["total_bytes"], rank.peak_bytes
    )


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
