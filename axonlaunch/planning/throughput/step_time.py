"""How long a step takes, from its operations: what overlaps as the engines let it overlap.

FSDP gathers a layer while the one before computes, DDP reduces buckets during backward, what a
tensor-parallel layer sends it waits for but for products that run meanwhile; the pipeline's bubble
follows from its actions. It leaves out what a host adds that can't keep up with its device.
"""

from __future__ import annotations

from collections.abc import Iterable

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.hardware import HardwareConfig
from axonlaunch.config.layout import Layout
from axonlaunch.config.schedule_rules import SCHEDULES
from axonlaunch.engines.pipeline.schedule import PipelineSchedule
from axonlaunch.engines.pipeline.timeline import Timeline, timeline
from axonlaunch.models.parameter_facts import TrainingShares
from axonlaunch.planning.measured_constants import FUSED
from axonlaunch.planning.throughput.collectives import Links
from axonlaunch.planning.throughput.operations import (
    Amount,
    AttentionOp,
    CollectiveOp,
    Kernel,
    Phase,
    Product,
    Work,
)
from axonlaunch.planning.throughput.roofline import Roofline
from axonlaunch.planning.throughput.step_work import Share, StageWork, StepWork

_FORWARD: tuple[Phase, ...] = ("forward",)
_BACKWARD: tuple[Phase, ...] = ("backward", "recomputation")
_DATA_AXES = frozenset({"dp_replicate", "dp_shard", "cp"})


class Parts(dict[str, float]):
    """Seconds by what they go to."""

    def put(self, name: str, seconds: float) -> None:
        """Add seconds to one part."""
        self[name] = self.get(name, 0.0) + seconds

    def put_all(self, other: Parts, *, times: float = 1.0) -> None:
        """Add seconds to each part."""
        for name, seconds in other.items():
            self.put(name, seconds * times)

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self.values())


class StepTime:
    """Times of one run's step on one kind of hardware."""

    def __init__(self, config: RunConfig, layout: Layout, hardware: HardwareConfig) -> None:
        self._config = config
        self._layout = layout
        self._roofline = Roofline(hardware, matmul_precision=config.train.matmul_precision)
        self._links = Links(hardware, layout.axes)

    def parts(self, work: StepWork) -> Parts:
        """Return where the seconds of a step go, on the rank that has most to do."""
        times = self._alone(work) if self._layout.pipeline == 1 else self._pipeline_parts(work)
        if copied := self._copy_time(work, times.total):
            times.put("host memory", copied)
        return times

    def about(self, work: StepWork) -> float:
        """Return the seconds of a step by an analytic formula of the pipeline's bubble.

        Ranks wait p - 1 times for a forward and a backward of a stage, under schedules that split
        the backward for a third of that.

        Source: Narayanan et al., 2021, section 2.2; Qi et al., 2024.
        """
        layout = self._layout
        if layout.pipeline == 1:
            alone = self._alone(work).total
            return alone + self._copy_time(work, alone)
        times = []
        for index, layers in enumerate(work.layers):
            stage = self._stage(work, index)
            forward, backward = (
                self._pass(stage, layers, phases).total for phases in (_FORWARD, _BACKWARD)
            )
            times.append((forward + backward, self._once(stage, layers).total))
        a_turn = max(seconds for seconds, _ in times)
        split = SCHEDULES[layout.schedule].separate_weight_grad
        waits = (layout.pipeline - 1) * (1 / 3 if split else 1.0) * layout.rounds
        turns = layout.micro_batches * layout.stages_per_rank
        once = max(update for _, update in times) * layout.stages_per_rank
        computing = (turns + waits) * a_turn + once
        return computing + self._copy_time(work, computing)

    def _copy_time(self, work: StepWork, step_s: float) -> float:
        """Return what copies from and to host memory add to a step.

        What FSDP gathers and reduces is copied beside computation; the update waits for its own.

        Raises:
            ConfigError: The host's cores do the update.
        """
        layout, offload = self._layout, self._config.strategy.fsdp.cpu_offload
        is_copied = layout.facts.shards_parameters and offload != "none"
        if not is_copied or self._links.takes_cores:
            return 0.0
        if offload == "full":
            message = "the speed of updates on the host's cores can't be estimated; use params"
            raise ConfigError([ConfigIssue("strategy.fsdp.cpu_offload", message, offload)])
        shards = layout.tensor * layout.pipeline * layout.dp_shard * layout.context
        state_bytes = self._config.train.parameter_bytes * work.parameters / shards
        rate = self._roofline.figure("host_gb_s") * self._roofline.figure("host_efficiency") * 1e9
        shares = TrainingShares.of(self._config)
        if offload == "optimizer_states":
            return float(2 * shares.states * state_bytes / rate)
        # The shard is read for forward and, where it was let go, for backward; its gradient is
        # written. An update reads both and writes the shard, of what is trained.
        reads = 1 if self._config.strategy.fsdp.sharding == "shard_grad_op" else 2
        beside = (reads + shares.gradients) * layout.micro_batches * state_bytes / rate
        return float(max(0.0, beside - step_s) + 3 * shares.gradients * state_bytes / rate)

    def _alone(self, work: StepWork) -> Parts:
        stage, layers = work.first, work.layers[0]
        forward = self._pass(stage, layers, _FORWARD)
        backward = self._pass(stage, layers, _BACKWARD)
        total = self._once(stage, layers)
        for part in (forward, backward):
            total.put_all(part, times=self._layout.micro_batches)
        if self._layout.facts.keeps_gradients:
            total.put("communication dp", self._reduced_in_backward(stage, layers, backward))
        return total

    def pipeline_timeline(self, work: StepWork) -> Timeline | None:
        """Return when each rank of a pipeline does what in a round, in seconds, if there is one."""
        return None if self._layout.pipeline == 1 else self._round(work)[0]

    def _round(self, work: StepWork) -> tuple[Timeline, list[Parts], list[Parts]]:
        """Return one round, and where the time of each stage's forward and backward goes."""
        layout = self._layout
        schedule = PipelineSchedule(
            layout.schedule,
            degree=layout.pipeline,
            microbatches=layout.microbatches_per_round,
            stages_per_rank=layout.stages_per_rank,
        )
        stages = [self._stage(work, index) for index in range(layout.num_stages)]
        forward, backward = (
            [self._pass(stage, n, phases) for stage, n in zip(stages, work.layers, strict=True)]
            for phases in (_FORWARD, _BACKWARD)
        )
        sent = sum(
            amount.num_bytes
            for key, amount in work.first.micro_ends.work.items()
            if not isinstance(key, Product | AttentionOp | Kernel | CollectiveOp)
        ) / min(2, layout.stages_per_rank)
        drawn = timeline(
            schedule,
            forward=[part.total for part in forward],
            backward=[part.total for part in backward],
            message=self._links.message(sent, axis="pp"),
        )
        return drawn, forward, backward

    def _pipeline_parts(self, work: StepWork) -> Parts:
        layout = self._layout
        drawn, forward, backward = self._round(work)
        stages = [self._stage(work, index) for index in range(layout.num_stages)]
        schedule, span = drawn.schedule, drawn.span * layout.rounds
        ranks: list[Parts] = []
        for rank in range(layout.pipeline):
            busy, total = Parts(), Parts()
            for stage in schedule.stages_of(rank):
                for part in (forward[stage], backward[stage]):
                    busy.put_all(part, times=layout.micro_batches)
                total.put_all(self._once(stages[stage], work.layers[stage]))
            total.put_all(busy)
            total.put("pipeline bubble", span - busy.total)
            ranks.append(total)
        return max(ranks, key=lambda times: times.total)

    def _stage(self, work: StepWork, index: int) -> StageWork:
        """Return the work of a stage: ends are with the first and the last, layers with all."""
        if index == 0:
            return work.first
        if index == self._layout.num_stages - 1:
            return work.last
        nothing = Share({})
        return StageWork(nothing, work.last.step_layer, nothing, work.last.micro_layer)

    def _pass(self, stage: StageWork, layers: int, phases: tuple[Phase, ...]) -> Parts:
        """Return where the time of one micro-batch's forward or backward goes."""
        ends, layer = _during(stage.micro_ends, phases), _during(stage.micro_layer, phases)
        of_ends = self._local(ends, fused=False)
        of_layer = self._local(layer, fused=self._config.train.compile)
        of_ends.put_all(self._waited_for(ends))
        of_layer.put_all(self._waited_for(layer))
        total = of_ends
        total.put_all(of_layer, times=layers)
        gathered_ends = self._gather_time(ends)
        gathered = self._gather_time(layer)
        if gathered_ends or gathered:
            # The ends are gathered before anything computes and reduced after everything has;
            # of the layers one is, the others are gathered and reduced under computation.
            alone = gathered if phases == _FORWARD else 0.0
            under = 0.0 if self._links.takes_cores else of_layer.total
            hidden = max(0.0, gathered - under) * max(0, layers - 1)
            total.put("communication dp", gathered_ends + alone + hidden)
        return total

    def _once(self, stage: StageWork, layers: int) -> Parts:
        """Return where the time goes of what a stage does once a step."""
        total = Parts()
        for share, times in ((stage.step_ends, 1), (stage.step_layer, layers)):
            updates = _during(share, ("update",))
            rest = _during(share, (*_FORWARD, *_BACKWARD))
            total.put("optimizer", self._local(updates, fused=False).total * times)
            total.put_all(self._local(rest, fused=False), times=times)
            for work in (updates, rest):
                for key, amount in work.items():
                    if isinstance(key, CollectiveOp) and not self._is_bucket(key):
                        seconds = self._links.seconds(key, amount) * times
                        if share is stage.step_layer and self._is_awaited_by_blocks(key):
                            seconds = self._left_of(seconds, stage, layers)
                        total.put(f"communication {_axis(key.axes)}", seconds)
        return total

    def _is_awaited_by_blocks(self, key: CollectiveOp) -> bool:
        """Say whether an exchange is of what ZeRO-1 has updated."""
        is_gather = (key.phase, key.kind) == ("update", "all_gather")
        return self._layout.facts.divides_update and is_gather

    def _left_of(self, seconds: float, stage: StageWork, layers: int) -> float:
        """Return what is waited for of blocks that travel while the next step computes.

        The first block waits for its own, each other computes no sooner than it is there.
        """
        if self._links.takes_cores:
            return seconds
        forward = _during(stage.micro_layer, _FORWARD)
        under = self._local(forward, fused=self._config.train.compile).total * layers
        return max(seconds / max(1, layers), seconds - under)

    def _local(self, work: Work, *, fused: bool) -> Parts:
        """Return the time of what a device does by itself."""
        total = Parts()
        for key, amount in work.items():
            seconds = self._roofline.seconds(key, amount)
            if isinstance(key, Product):
                total.put("matrix products", seconds)
            elif isinstance(key, AttentionOp):
                total.put("attention", seconds)
            elif isinstance(key, Kernel):
                total.put("memory-bound", seconds * (FUSED if fused else 1.0))
        return total

    def _waited_for(self, work: Work) -> Parts:
        """Return the time of exchanges that hold up what follows them."""
        total = Parts()
        for key, amount in work.items():
            if isinstance(key, CollectiveOp) and not self._is_gathered_or_bucket(key):
                beside = () if self._links.takes_cores else key.under
                under = sum(
                    self._roofline.seconds(operation, Amount(amount.count)) for operation in beside
                )
                waited = max(0.0, self._links.seconds(key, amount) - under)
                total.put(f"communication {_axis(key.axes)}", waited)
        return total

    def _gather_time(self, work: Work) -> float:
        """Return the time of FSDP's exchanges, which have a stream of their own."""
        return sum(
            self._links.seconds(key, amount)
            for key, amount in work.items()
            if isinstance(key, CollectiveOp) and self._is_gathered(key)
        )

    def _is_gathered(self, key: CollectiveOp) -> bool:
        small = key.kind == "all_reduce" and self._layout.dp_replicate == 1
        sharded = self._layout.facts.shards_parameters
        return sharded and bool(key.axes) and _DATA_AXES.issuperset(key.axes) and not small

    def _is_gathered_or_bucket(self, key: CollectiveOp) -> bool:
        """Say whether an exchange is counted as one that others hide, not where it stands."""
        # In the trace of a step of one micro-batch, buckets are among what each micro-batch sends.
        return self._is_gathered(key) or (self._layout.micro_batches == 1 and self._is_bucket(key))

    def _reduced_in_backward(self, stage: StageWork, layers: int, backward: Parts) -> float:
        """Return what is left of the gradients' reduction after the last backward.

        What is not done when backward is, and the last bucket in any case, is waited for.
        """
        seconds, buckets = 0.0, 0.0
        for key, amount in self._buckets(stage, layers):
            seconds += self._links.seconds(key, amount)
            buckets += amount.count
        if not buckets:
            return 0.0
        if self._config.strategy.ddp.sync != "overlapped" or self._links.takes_cores:
            return seconds
        return max(seconds / buckets, seconds - backward.total)

    def _buckets(self, stage: StageWork, layers: int) -> list[tuple[CollectiveOp, Amount]]:
        """Return the exchanges of gradients that a backward starts.

        The trace has seen our own buckets. torch's DDP, which takes plain parameters summed in
        their own type where each rank needs them whole, reduces from C++; its buckets are counted
        by their size: one of 1 MiB, then of ``strategy.ddp.bucket_size_mb``, over all gradients.
        """
        strategy = self._config.strategy
        if self._layout.gradient_ranks == 1:
            return []
        torchs = strategy.ddp.sync == "overlapped" and strategy.reduce_dtype == "fp32"
        if torchs and self._layout.tensor == 1 and not self._layout.facts.divides_update:
            num_bytes = stage.step_ends.gradient_bytes + layers * stage.step_layer.gradient_bytes
            count = 1 + max(0.0, num_bytes - 2**20) / (strategy.ddp.bucket_size_mb * 2**20)
            key = CollectiveOp("backward", "all_reduce", ("dp_replicate", "cp"))
            return [(key, Amount(count, num_bytes))]
        shares = [(stage.step_ends, 1), (stage.step_layer, layers)]
        if self._layout.micro_batches == 1:
            shares += [(stage.micro_ends, 1), (stage.micro_layer, layers)]
        return [
            (key, amount * times)
            for share, times in shares
            for key, amount in _during(share, _BACKWARD).items()
            if isinstance(key, CollectiveOp) and self._is_bucket(key)
        ]

    def _is_bucket(self, key: CollectiveOp) -> bool:
        replicated = self._layout.facts.keeps_gradients
        kind = "reduce_scatter" if self._layout.facts.divides_update else "all_reduce"
        alone = self._layout.pipeline == 1 and (key.phase, key.kind) == ("backward", kind)
        return replicated and alone and bool(key.axes) and _DATA_AXES.issuperset(key.axes)


def _during(share: Share, phases: Iterable[Phase]) -> Work:
    wanted = set(phases)
    return {key: amount for key, amount in share.work.items() if key.phase in wanted}


def _axis(axes: tuple[str, ...]) -> str:
    """Return the name of a mesh axis for a report, in which all data axes are one."""
    if not axes or _DATA_AXES.issuperset(axes):
        return "dp"
    return axes[0] if len(axes) == 1 else "world"
