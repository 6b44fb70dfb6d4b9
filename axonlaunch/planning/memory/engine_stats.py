"""What the engines' memory statistics would say of a run, out of its estimate.

They are the engines' own: a sharded module's parameters are measured as a real one's are, and a
pipeline's activations are those that its schedule holds, of the bytes that a trace shows.
"""

from __future__ import annotations

from axonlaunch.engines.data_parallel.fsdp_memory import FSDPMemoryStats
from axonlaunch.engines.pipeline.schedule import PipelineSchedule
from axonlaunch.engines.pipeline.timeline import PipelineMemoryStats
from axonlaunch.planning.records import Estimate, RankEstimate


def fsdp_stats(rank: RankEstimate) -> FSDPMemoryStats:
    """Return what ``FSDP.memory_stats`` would say on a rank after a step.

    Its ``device_peak_bytes`` are those of all tensors, of whatever device.

    Raises:
        ValueError: Nothing is sharded there.
    """
    stats = rank.sharded_parameters
    if stats is None:
        raise ValueError("no parameters are sharded; use strategy=fsdp")
    return FSDPMemoryStats.of(
        stats["current_bytes"], stats["peak_bytes"], stats["total_bytes"], rank.peak_bytes
    )


def pipeline_stats(estimate: Estimate, schedule: PipelineSchedule) -> PipelineMemoryStats:
    """Return what a schedule costs, with the bytes of the activations that each stage holds.

    Args:
        estimate: Of the run, every place on its pp axis.
        schedule: The run's.
    """
    of_stage: dict[int, int] = {}
    for place, rank in enumerate(estimate.ranks):
        of_stage |= zip(schedule.stages_of(place), rank.microbatch_bytes, strict=True)
    return PipelineMemoryStats.from_schedule(
        schedule, [of_stage[stage] for stage in range(schedule.num_stages)]
    )
