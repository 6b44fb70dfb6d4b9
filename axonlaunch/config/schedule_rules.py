"""What each pipeline schedule asks of stages and micro-batches, without torch.

It holds rules alone; the order of a schedule's actions is torch's, read by ``engines``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleRule:
    """Demands of a schedule.

    Attributes:
        stages_per_rank: Stages that a rank holds unless it is said otherwise.
        fixed: Whether that number is the only one.
        v_shaped: Whether stages run to the last rank and back, so that the first rank also holds
            the last stage; else they go round and round.
        separate_weight_grad: Whether gradients of weights are computed apart from those of inputs.
        in_rounds: Whether micro-batches must fill rounds of about one a rank.
        two_way: Whether micro-batches must fill every stage, for both directions overlap.
    """

    stages_per_rank: int = 1
    fixed: bool = True
    v_shaped: bool = False
    separate_weight_grad: bool = False
    in_rounds: bool = False
    two_way: bool = False

    def least_microbatches(self, *, degree: int, stages_per_rank: int) -> int:
        """Return how many micro-batches a round has at least: one a rank, or one a stage.

        torch needs one a rank for 1f1b and one a stage for dualpipev. It runs the others with
        fewer, but those are too few to keep all ranks at work, so that is refused too.
        """
        return degree * stages_per_rank if self.two_way else degree

    def fits(self, microbatches: int, *, degree: int, stages_per_rank: int) -> bool:
        """Say whether the schedule can order so many micro-batches.

        Args:
            microbatches: Of one round.
            degree: Ranks of the pipeline.
            stages_per_rank: That each holds.
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
