"""Requirements of pipeline schedules on stages and micro-batches, without torch.

The order of actions of a schedule is defined by torch and read by ``engines``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleRule:
    """Requirements of a schedule.

    Attributes:
        stages_per_rank: Default number of stages on a rank.
        fixed: Whether no other number of stages is possible.
        v_shaped: Whether stages run to the last rank and back, so that the first rank also holds
            the last stage. If false, stages go around the ranks in a circle.
        separate_weight_grad: Whether gradients of weights and of inputs are computed separately.
        in_rounds: Whether micro-batches must fill rounds of about one micro-batch per rank.
        two_way: Whether there must be one micro-batch per stage, because both directions overlap.
    """

    stages_per_rank: int = 1
    fixed: bool = True
    v_shaped: bool = False
    separate_weight_grad: bool = False
    in_rounds: bool = False
    two_way: bool = False

    def least_microbatches(self, *, degree: int, stages_per_rank: int) -> int:
        """Return the smallest number of micro-batches in a round: one per rank, or one per stage.

        torch requires one per rank for 1f1b and one per stage for dualpipev. It runs the other
        schedules with fewer, but then some ranks have no work, so that is an error too.
        """
        return degree * stages_per_rank if self.two_way else degree

    def fits(self, microbatches: int, *, degree: int, stages_per_rank: int) -> bool:
        """Return whether the schedule supports a number of micro-batches.

        Args:
            microbatches: Number of micro-batches in one round.
            degree: Number of ranks of the pipeline.
            stages_per_rank: Number of stages on each rank.
        """
        if microbatches < self.least_microbatches(degree=degree, stages_per_rank=stages_per_rank):
            return False
        return not self.in_rounds or microbatches % max(1, microbatches // degree) == 0


SCHEDULES: dict[str, ScheduleRule] = {
    "gpipe": ScheduleRule(),
    "1f1b": ScheduleRule(),
    "interleaved_1f1b": ScheduleRule(stages_per_rank=2, fixed=False, in_rounds=True),
    "looped_bfs": ScheduleRule(stages_per_rank=2, fixed=False),
    "interleaved_zero_bubble": ScheduleRule(
        stages_per_rank=2, fixed=False, in_rounds=True, separate_weight_grad=True
    ),
    "zbv_zero_bubble": ScheduleRule(stages_per_rank=2, v_shaped=True, separate_weight_grad=True),
    "dualpipev": ScheduleRule(
        stages_per_rank=2, v_shaped=True, separate_weight_grad=True, two_way=True
    ),
}
