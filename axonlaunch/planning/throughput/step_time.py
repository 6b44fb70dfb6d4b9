"""Estimates the time of a step from its operations and their overlap in the engines.

- FSDP gathers a layer while the previous layer computes.
- DDP reduces buckets during backward.
- A tensor-parallel layer waits for its communication, except while matrix products run.
- The bubble of a pipeline follows from its actions.
- A device with little work waits for its host, which starts operations one after another.
"""

from __future__ import annotations

from collections.abc import Iterable

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.axes import DATA_AXES, EXPERT, EXPERT_SHARD, LIKE_DATA
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.consistency.run_nodes import RunNodes
from axonlaunch.config.consistency.run_precision import sums_as_stored
from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.engines.pipeline.schedule import PipelineSchedule
from axonlaunch.engines.pipeline.timeline import Timeline, timeline
from axonlaunch.models.facts.parameter_facts import TrainingShares
from axonlaunch.planning.measured_constants import FUSED, HOST_COPIES, LAUNCH_S
from axonlaunch.planning.throughput.collectives import Links
from axonlaunch.planning.throughput.operations import (
    Amount,
    AttentionOp,
    CollectiveOp,
    HostWait,
    Kernel,
    Phase,
    Product,
    Rounding,
    Send,
    Work,
)
from axonlaunch.planning.throughput.roofline import Roofline
from axonlaunch.planning.throughput.step_work import Share, StageWork, StepWork

_FORWARD: tuple[Phase, ...] = ("forward",)
_BACKWARD: tuple[Phase, ...] = ("backward", "recomputation")
_OF_DATA = {*DATA_AXES, EXPERT_SHARD}
"""Names of the axes along which data parallelism shards or replicates parameters."""


class Parts(dict[str, float]):
    """Seconds by activity."""

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to one activity."""
        self[name] = self.get(name, 0.0) + seconds

    def add_all(self, other: Parts, *, times: float = 1.0) -> None:
        """Add ``times`` the seconds of each activity of ``other``."""
        for name, seconds in other.items():
            self.add(name, seconds * times)

    @property
    def total(self) -> float:
        """Sum of all activities."""
        return sum(self.values())


class StepTime:
    """Estimates the time of one run's step on given hardware."""

    def __init__(self, config: RunConfig, layout: Layout, hardware: HardwareConfig) -> None:
        self._config = config
        self._layout = layout
        self._roofline = Roofline(hardware, matmul_precision=config.train.matmul_precision)
        self._links = Links(
            hardware,
            layout.axes,
            layout.expert_axes,
            ranks_per_node=RunNodes.of(config, hardware).ranks,
        )

    def parts(self, work: StepWork) -> Parts:
        """Return the seconds of a step by activity on the rank with the longest step.

        Raises:
            ConfigError: The update runs on the host, or a kernel has not been measured.
        """
        self._refuse_unmeasured()
        times = (
            self._parts_without_pipeline(work)
            if self._layout.pipeline == 1
            else self._pipeline_parts(work)
        )
        if copied := self._copy_time(work):
            times.add("host memory", copied)
        return times

    def approximate(self, work: StepWork) -> float:
        """Return the approximate seconds of a step, with a formula for the pipeline bubble.

        Ranks of a pipeline of p ranks wait p - 1 times for the forward and backward of a stage. For
        schedules that split the backward, they wait a third of that.

        Source: Narayanan et al., 2021, section 2.2; Qi et al., 2024.

        Raises:
            ConfigError: The update runs on the host, or a kernel has not been measured.
        """
        self._refuse_unmeasured()
        layout = self._layout
        if layout.pipeline == 1:
            return self._parts_without_pipeline(work).total + self._copy_time(work)
        times, copied = [], self._input_copy_time(work)
        for index in work.different_stages:
            stage, layers = work.stage(index), work.layers[index]
            forward, backward = (
                self._micro_batch(stage, layers, phases, copied=copied).total
                for phases in (_FORWARD, _BACKWARD)
            )
            times.append((forward + backward, self._per_step(stage, layers).total))
        longest_pass = max(seconds for seconds, _ in times)
        splits_backward = SCHEDULES[layout.schedule].separate_weight_grad
        bubble = (layout.pipeline - 1) * (1 / 3 if splits_backward else 1.0) * layout.rounds
        passes = layout.micro_batches * layout.stages_per_rank
        per_step = max(update for _, update in times) * layout.stages_per_rank
        return (passes + bubble) * longest_pass + per_step + self._copy_time(work)

    def _refuse_unmeasured(self) -> None:
        if (kernel := self._config.train.loss_kernel) is not None:
            message = "its speed has not been measured, so it can't be predicted; use null"
            raise ConfigError([ConfigIssue("train.loss_kernel", message, kernel)])

    def _copy_time(self, work: StepWork) -> float:
        """Return the seconds that copies from and to host memory add to a step.

        Raises:
            ConfigError: The update runs on the host.
        """
        layout, offload = self._layout, self._config.strategy.fsdp.cpu_offload
        is_copied = layout.facts.shards_parameters and offload != "none"
        if not is_copied or self._links.computes_on_cores:
            return 0.0
        if offload == "full":
            message = "the speed of updates on the host's cores can't be estimated; use params"
            raise ConfigError([ConfigIssue("strategy.fsdp.cpu_offload", message, offload)])
        shards = layout.parameter_divisor * layout.parameter_shards
        state_bytes = self._config.train.parameter_bytes * work.parameters / shards
        shares = TrainingShares.of(self._config)
        if offload == "optimizer_states":
            copied = shares.states
        else:
            # An update reads the shard and the gradient of trained parameters. Less is written.
            copied = self._gathers + 2 * shares.gradients
        return float(HOST_COPIES * copied * state_bytes / self._host_rate)

    @property
    def _gathers(self) -> int:
        """Number of times that a step gathers a layer, for which it reads the layer's shard."""
        if self._layout.pipeline > 1:
            return 1  # stages stay gathered for all micro-batches
        frees = self._config.strategy.fsdp.sharding in ("full_shard", "hybrid_shard")
        return self._layout.micro_batches * (2 if frees else 1)

    def _input_copy_time(self, work: StepWork) -> float:
        """Return the seconds of the copy of a layer's input to host memory, or back.

        Without offloaded inputs, and on a CPU, where it takes no link, they are 0.
        """
        train, layout = self._config.train, self._layout
        if not train.offloads_inputs or self._links.computes_on_cores:
            return 0.0
        positions = layout.micro_batch_size * work.sample_length / layout.divisor("sequences")
        if self._config.strategy.tensor.sequence_parallel:
            positions /= layout.tensor
        element = PRECISIONS[train.precision].compute.nbytes
        return float(positions * work.hidden_size * element / self._host_rate)

    @property
    def _host_rate(self) -> float:
        """Bytes per second of the link to host memory, in one direction."""
        figure = self._roofline.figure
        return float(figure("host_gb_s") * figure("host_efficiency") * 1e9)

    def _parts_without_pipeline(self, work: StepWork) -> Parts:
        stage, layers = work.stage(0), work.layers[0]
        forward, backward = (
            self._micro_batch(stage, layers, phases, copied=self._input_copy_time(work))
            for phases in (_FORWARD, _BACKWARD)
        )
        total = self._per_step(stage, layers)
        for part in (forward, backward):
            total.add_all(part, times=self._layout.micro_batches)
        if self._layout.facts.keeps_gradients:
            total.add("communication dp", self._exposed_reduction(stage, layers, backward))
        return total

    def pipeline_timeline(self, work: StepWork) -> Timeline | None:
        """Return the actions of a pipeline round with their times; None without a pipeline."""
        return None if self._layout.pipeline == 1 else self._round(work)[0]

    def _round(self, work: StepWork) -> tuple[Timeline, list[Parts], list[Parts]]:
        """Return one round, and the parts of each stage's forward and backward."""
        layout = self._layout
        schedule = PipelineSchedule.of(layout)
        stages = [work.stage(index) for index in range(layout.num_stages)]
        forward, backward = (
            [
                self._micro_batch(stage, n, phases, copied=self._input_copy_time(work))
                for stage, n in zip(stages, work.layers, strict=True)
            ]
            for phases in (_FORWARD, _BACKWARD)
        )
        sends = [
            amount for key, amount in work.first.micro_ends.work.items() if isinstance(key, Send)
        ]
        message_bytes = sum(each.num_bytes for each in sends) / sum(each.count for each in sends)
        round_timeline = timeline(
            schedule,
            forward=[parts.total for parts in forward],
            backward=[parts.total for parts in backward],
            message=self._links.message(message_bytes, axis="pp"),
        )
        return round_timeline, forward, backward

    def _pipeline_parts(self, work: StepWork) -> Parts:
        layout = self._layout
        round_timeline, forward, backward = self._round(work)
        stages = [work.stage(index) for index in range(layout.num_stages)]
        schedule, span = round_timeline.schedule, round_timeline.span * layout.rounds
        ranks: list[Parts] = []
        for rank in range(layout.pipeline):
            busy, total = Parts(), Parts()
            for stage in schedule.stages_of(rank):
                for part in (forward[stage], backward[stage]):
                    busy.add_all(part, times=layout.micro_batches)
                total.add_all(self._per_step(stages[stage], work.layers[stage]))
            total.add_all(busy)
            total.add("pipeline bubble", span - busy.total)
            ranks.append(total)
        return max(ranks, key=lambda times: times.total)

    def _micro_batch(
        self, stage: StageWork, layers: int, phases: tuple[Phase, ...], *, copied: float
    ) -> Parts:
        """Return the parts of one micro-batch's forward or backward.

        Args:
            stage: Work of the stage.
            layers: Number of layers of the stage.
            phases: Phases of the pass.
            copied: Seconds of the copy of a layer's input to or from host memory.
        """
        ends, layer = _during(stage.micro_ends, phases), _during(stage.micro_layer, phases)
        end_parts = self._local(ends, fused=False)
        layer_parts = self._local(layer, fused=self._config.train.compile)
        end_parts.add_all(self._blocking(ends))
        layer_parts.add_all(self._blocking(layer))
        total = end_parts
        total.add_all(layer_parts, times=layers)
        end_seconds = self._fsdp_time(ends)
        layer_seconds = self._fsdp_time(layer)
        if end_seconds or layer_seconds:
            # Gathering the ends and one layer, and reducing the ends, cannot overlap with
            # computation. The communication of all other layers can.
            first_layer = layer_seconds if phases == _FORWARD else 0.0
            overlap = 0.0 if self._links.computes_on_cores else layer_parts.total
            exposed = max(0.0, layer_seconds - overlap) * max(0, layers - 1)
            total.add("communication dp", end_seconds + first_layer + exposed)
        if copied:
            # A layer's copy overlaps with its forward, or with the backward of the next layer,
            # which the last layer does not have.
            waited = layers * max(0.0, copied - layer_parts.total)
            total.add("host memory", waited + (0.0 if phases == _FORWARD else copied))
        if (late := self._launch_time(ends, layer, layers) - total.total) > 0:
            total.add("launches", late)
        return total

    def _launch_time(self, ends: Work, layer: Work, layers: int) -> float:
        """Return the seconds in which the host starts the operations of ends and layers.

        Operations of compiled layers are not counted, because their launch time was not measured.
        """
        if self._links.computes_on_cores:
            return 0.0  # operations of a CPU run where they are started
        times = 0 if self._config.train.compile else layers
        count = sum(
            amount.count * runs * (key.kernels if isinstance(key, Rounding) else 1)
            for work, runs in ((ends, 1), (layer, times))
            for key, amount in work.items()
            if not isinstance(key, Send | HostWait)
        )
        return float(count * LAUNCH_S)

    def _per_step(self, stage: StageWork, layers: int) -> Parts:
        """Return the parts of the work that a stage does once per step."""
        total = Parts()
        for share, times in ((stage.step_ends, 1), (stage.step_layer, layers)):
            updates = _during(share, ("update",))
            other = _during(share, (*_FORWARD, *_BACKWARD))
            total.add("optimizer", self._local(updates, fused=False).total * times)
            total.add_all(self._local(other, fused=False), times=times)
            for work in (updates, other):
                for key, amount in work.items():
                    if isinstance(key, CollectiveOp) and not self._is_bucket(key):
                        seconds = self._links.seconds(key, amount) * times
                        if share is stage.step_layer and self._is_update_gather(key):
                            seconds = self._exposed_time(seconds, stage, layers)
                        total.add(f"communication {self._axis(key)}", seconds)
        return total

    def _axis(self, key: CollectiveOp) -> str:
        """Return the name of a mesh axis for reports, which combine all data axes."""
        if self._sends_to_experts(key):
            return EXPERT
        if _OF_DATA.issuperset(key.axes) and not self._exchanges_sequences(key):
            return "dp"
        return key.axes[0] if len(key.axes) == 1 else "world"

    def _sends_to_experts(self, key: CollectiveOp) -> bool:
        """Return whether a collective exchanges tokens with the ranks of other experts.

        Muon sends matrices in updates, and ranks that share sequences send gradients of keys and
        values. A group along ``ep`` that is also one along axes of the run's mesh has their names;
        it has the innermost ranks. If these share sequences, too, all they send counts here.
        """
        layout = self._layout
        if key.kind != "all_to_all" or key.phase == "update" or layout.expert == 1:
            return False
        if EXPERT in key.axes:
            return True
        return layout.ranks_along(key.axes) == layout.expert and layout.stride(key.axes[-1]) == 1

    def _is_update_gather(self, key: CollectiveOp) -> bool:
        """Return whether a collective gathers the parameters updated by ZeRO-1."""
        is_gather = (key.phase, key.kind) == ("update", "all_gather")
        return self._layout.facts.divides_update and is_gather

    def _exposed_time(self, seconds: float, stage: StageWork, layers: int) -> float:
        """Return the exposed time of gathers that overlap with the next forward.

        The first block waits for its gather, and every other block starts after its own.
        """
        if self._links.computes_on_cores:
            return seconds
        forward = _during(stage.micro_layer, _FORWARD)
        overlap = self._local(forward, fused=self._config.train.compile).total * layers
        return max(seconds / max(1, layers), seconds - overlap)

    def _local(self, work: Work, *, fused: bool) -> Parts:
        """Return the time of computation on a device."""
        total = Parts()
        for key, amount in work.items():
            seconds = self._roofline.seconds(key, amount)
            if isinstance(key, Product):
                total.add("matrix products", seconds)
            elif isinstance(key, AttentionOp):
                total.add("attention", seconds)
            elif isinstance(key, Rounding):
                fused_seconds = self._roofline.fused_seconds(key, amount) if fused else seconds
                total.add("memory-bound", fused_seconds)
            elif isinstance(key, Kernel):
                total.add("memory-bound", seconds * (FUSED if fused else 1.0))
            elif isinstance(key, HostWait) and seconds:
                total.add("host waits", seconds)
        return total

    def _blocking(self, work: Work) -> Parts:
        """Return the time of collectives that block the following operations."""
        total = Parts()
        for key, amount in work.items():
            if isinstance(key, CollectiveOp) and not self._is_hidden(key):
                products = () if self._links.computes_on_cores else key.overlapping
                overlap = sum(
                    self._roofline.seconds(operation, Amount(amount.count))
                    for operation in products
                )
                exposed = max(0.0, self._links.seconds(key, amount) - overlap)
                total.add(f"communication {self._axis(key)}", exposed)
        return total

    def _fsdp_time(self, work: Work) -> float:
        """Return the time of FSDP's collectives, which run on separate streams."""
        return sum(
            self._links.seconds(key, amount)
            for key, amount in work.items()
            if isinstance(key, CollectiveOp) and self._is_fsdp(key)
        )

    def _is_fsdp(self, key: CollectiveOp) -> bool:
        is_scalar_reduction = key.kind == "all_reduce" and self._layout.dp_replicate == 1
        shards_parameters = self._layout.facts.shards_parameters
        return (
            shards_parameters
            and key.kind != "all_to_all"
            and bool(key.axes)
            and _OF_DATA.issuperset(key.axes)
            and not self._exchanges_sequences(key)
            and not is_scalar_reduction
        )

    def _exchanges_sequences(self, key: CollectiveOp) -> bool:
        """Return whether a collective exchanges keys and values, which attention waits for.

        Parameters and gradients travel along other data axes too, if there are any.
        """
        layout = self._layout
        others = layout.dp_shard if layout.facts.shards_parameters else layout.dp_replicate
        return others > 1 and bool(key.axes) and set(key.axes) <= {*LIKE_DATA}

    def _is_hidden(self, key: CollectiveOp) -> bool:
        """Return whether a collective overlaps with computation and is counted separately."""
        # With a single micro-batch, buckets are part of the work per micro-batch.
        return self._is_fsdp(key) or (self._layout.micro_batches == 1 and self._is_bucket(key))

    def _exposed_reduction(self, stage: StageWork, layers: int, backward: Parts) -> float:
        """Return the exposed time of the gradient reduction after the last backward.

        This is the part that does not fit into the backward, and at least the last bucket.
        """
        seconds, buckets = 0.0, 0.0
        for key, amount in self._buckets(stage, layers):
            seconds += self._links.seconds(key, amount)
            buckets += amount.count
        if not buckets:
            return 0.0
        if self._config.strategy.ddp.sync != "overlapped" or self._links.computes_on_cores:
            return seconds
        return max(seconds / buckets, seconds - backward.total)

    def _buckets(self, stage: StageWork, layers: int) -> list[tuple[CollectiveOp, Amount]]:
        """Return the collectives for gradients that a backward starts.

        The trace contains the buckets of this program. torch's DDP reduces from C++, which is not
        traced: its number of buckets follows from the size of the gradients, with a first bucket
        of 1 MiB and further ones of ``strategy.ddp.bucket_size_mb``. DDP is used for unsharded
        parameters whose gradients are summed in their own format.
        """
        strategy = self._config.strategy
        if self._layout.gradient_ranks == 1:
            return []
        is_torch_ddp = strategy.ddp.sync == "overlapped" and sums_as_stored(self._config)
        if is_torch_ddp and self._layout.tensor == 1 and not self._layout.facts.divides_update:
            num_bytes = stage.step_ends.gradient_bytes + layers * stage.step_layer.gradient_bytes
            count = 1 + max(0.0, num_bytes - 2**20) / (strategy.ddp.bucket_size_mb * 2**20)
            key = CollectiveOp("backward", "all_reduce", self._layout.division().sum_axes)
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
        keeps_gradients = self._layout.facts.keeps_gradients
        kind = "reduce_scatter" if self._layout.facts.divides_update else "all_reduce"
        is_reduction = self._layout.pipeline == 1 and (key.phase, key.kind) == ("backward", kind)
        return (
            keeps_gradients
            and is_reduction
            and bool(key.axes)
            and set(DATA_AXES).issuperset(key.axes)
        )


def _during(share: Share, phases: Iterable[Phase]) -> Work:
    wanted = set(phases)
    return {key: amount for key, amount in share.work.items() if key.phase in wanted}
