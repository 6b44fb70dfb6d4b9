"""Records of estimates and plans, which a process without torch can read.

``memory``, ``throughput`` and ``search`` compute them, ``reports`` displays them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from axonlaunch.config.consistency.run_nodes import RunNodes

FitVerdict: TypeAlias = Literal["fits", "tight", "too_large"]

if TYPE_CHECKING:
    from axonlaunch.planning.tracing.storage_trace import Category


@dataclass(frozen=True)
class RankEstimate:
    """Memory of one rank. Ranks with the same coordinate on the pp axis need no more.

    Attributes:
        rank: Global rank.
        coords: Coordinate on each axis of the mesh.
        peak_bytes: Peak of device memory in a steady step.
        host_bytes: Peak of offloaded host memory.
        breakdown: Parts of ``peak_bytes`` by category.
        sharded_parameters: ``FSDPMemoryStats`` of the parameters that ``fully_shard`` divides:
            ``current_bytes`` between steps, ``peak_bytes``, ``total_bytes``. None if no parameter
            is sharded.
        microbatch_bytes: Activations that the forward of one micro-batch keeps for backward, for
            each pipeline stage of the rank; empty without a pipeline.
        read_bytes: Additional peak of host memory for reading initial weights; 0 if none are read.
    """

    rank: int
    coords: dict[str, int]
    peak_bytes: int
    host_bytes: int
    breakdown: dict[Category, int]
    sharded_parameters: dict[str, int] | None = None
    microbatch_bytes: list[int] = field(default_factory=list)
    read_bytes: int = 0


@dataclass(frozen=True)
class Estimate:
    """Estimated memory of a run.

    Attributes:
        world_size: Number of ranks.
        mesh: Number of ranks along each axis, outermost first.
        parameters: Number of parameters of the full model.
        peak_bytes: Peak of the tensors on the highest rank. On a GPU this includes workspaces of
            kernels, as in ``torch.cuda.max_memory_allocated``, but without rounding.
        reserved_bytes: Memory reserved by torch's allocator on a GPU; ``peak_bytes`` on a CPU.
        process_bytes: Device memory of the process on a GPU: ``reserved_bytes``, the CUDA context
            and NCCL's buffers. ``peak_bytes`` on a CPU.
        ranks: One rank for each distinct position on the pp axis.
        context_bytes: Part of ``process_bytes`` for the CUDA context.
        communicator_bytes: Part of ``process_bytes`` for NCCL's buffers.
    """

    world_size: int
    mesh: dict[str, int]
    parameters: int
    peak_bytes: int
    reserved_bytes: int
    process_bytes: int
    ranks: list[RankEstimate]
    context_bytes: int = 0
    communicator_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """Peak of offloaded host memory on any rank."""
        return max(rank.host_bytes for rank in self.ranks)

    @property
    def saved_bytes(self) -> int:
        """Maximum over the ranks of the device memory to save: weights and optimizer states."""
        return max(
            rank.breakdown["parameters"] + rank.breakdown["optimizer"] for rank in self.ranks
        )


def verdict(num_bytes: float, *, memory: float, margin: float) -> FitVerdict:
    """Return whether an estimate fits a device, with a margin for estimates that are too low.

    An example for a device of 80 GiB and a margin of 0.1: 70 GiB fit, 75 GiB are tight (82.5 may
    be needed), 81 GiB are too large.

    Args:
        num_bytes: Estimated bytes.
        memory: Memory of the device in bytes.
        margin: Fraction of ``num_bytes`` by which the estimate may be too low.
    """
    if num_bytes <= memory / (1 + margin):
        return "fits"
    return "tight" if num_bytes <= memory else "too_large"


@dataclass(frozen=True)
class Workload:
    """Settings that determine the memory and compute of a step.

    Attributes:
        global_batch_size: Samples per step.
        micro_batch_size: Samples per forward on one rank; None if it is being searched.
        sequence_length: Positions per sample; None if samples are not sequences.
        precision: Precision of forward and backward.
        activation_checkpointing: Mode of activation checkpointing; None if it is being searched.
        model: Name of the model.
    """

    global_batch_size: int
    micro_batch_size: int | None
    sequence_length: int | None
    precision: str
    activation_checkpointing: str | None
    model: str = "model"

    def __str__(self) -> str:
        """Return a description for the first line of a table."""
        facts = [f"batch {self.global_batch_size:,}"]
        if self.micro_batch_size is not None:
            facts[0] += f" (micro-batch {self.micro_batch_size:,})"
        if self.sequence_length is not None:
            facts.append(f"{self.sequence_length:,} positions")
        facts.append(self.precision)
        if self.activation_checkpointing is None:
            facts.append("recomputation per layout")
        else:
            facts.append(describe_recomputation(self.activation_checkpointing))
        return ", ".join(facts)


def describe_recomputation(mode: str) -> str:
    """Return a description of a value of ``train.activation_checkpointing``."""
    kind = {"none": "no", "offload": "full", "selective_offload": "selective"}.get(mode, mode)
    return f"{kind} recomputation{', inputs offloaded' if 'offload' in mode else ''}"


@dataclass(frozen=True)
class StepPrediction:
    """Predicted time of a step.

    Attributes:
        hardware: Name of the hardware.
        step_s: Seconds per optimizer step.
        parts: Seconds of a step by activity, with the names of ``diagnostics.step_breakdown``.
        pipeline: One round of a pipeline, as ``(pipeline rank, start, stop, action)`` in seconds.
            An action ``2F0`` consists of stage, kind and micro-batch. Empty without a pipeline.
    """

    hardware: str
    step_s: float
    parts: dict[str, float]
    pipeline: list[tuple[int, float, float, str]] = field(default_factory=list)


@dataclass(frozen=True)
class FailureRates:
    """Device hours for each failure of a run: pessimistic, expected and optimistic."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True, kw_only=True)
class TrainingForecast:
    """Predicted training on a number of tokens, with failures and saves.

    Attributes:
        tokens: Number of tokens.
        steps: Number of optimizer steps.
        step_s: Seconds per step.
        devices: Number of devices.
        days: Expected duration in days.
        days_at_best: Duration with ``goodput_high``.
        days_at_worst: Duration with ``goodput_low``.
        device_hours: Devices times the expected duration in hours.
        goodput: Expected fraction of the time in productive steps.
        goodput_low: Goodput with the low failure rate, which 95% of such runs exceed.
        goodput_high: Goodput with the high failure rate, which 5% of such runs exceed.
        saving: Fraction of the time in which training waits for saves.
        lost: Fraction of the time in steps that are repeated after a failure.
        restarting: Fraction of the time from failures until training continues.
        failures: Expected number of failures.
        hours_between_failures: Mean time between failures.
        gpu_hours_per_failure: Device hours for each failure.
        checkpoint_every: Steps between saves with the highest expected goodput.
        checkpoint_bytes: Bytes of a checkpoint.
        save_s: Seconds from the beginning of a save until the checkpoint is complete.
        stalled_s: Part of it in which training waits.
        restart_s: Seconds from a failure until training continues.
        spares: Number of spare nodes that replace all nodes that fail in a day, in 95% of days.
        devices_per_spare: Devices of such a node; 1 if the hardware does not say it.
        price: Price in the currency of ``hardware.price_per_hour``; None without it.
        mwh: Energy in MWh; None without ``hardware.kwh_per_hour``.
        configured_every: ``checkpoint.every``, if it is a number of steps.
        configured_goodput: Goodput with it.
        assumed: Typical figures in place of missing ones, by key of ``hardware``; None for rates of
            failures, which depend on the number of devices.
    """

    tokens: float
    steps: int
    step_s: float
    devices: int
    days: float
    days_at_best: float
    days_at_worst: float
    device_hours: float
    goodput: float
    goodput_low: float
    goodput_high: float
    saving: float
    lost: float
    restarting: float
    failures: float
    hours_between_failures: float
    gpu_hours_per_failure: FailureRates
    checkpoint_every: int
    checkpoint_bytes: int
    save_s: float
    stalled_s: float
    restart_s: float
    spares: int
    devices_per_spare: int
    price: float | None
    mwh: float | None
    configured_every: int | None
    configured_goodput: float | None
    assumed: dict[str, float | None]


@dataclass(frozen=True)
class HostMemory:
    """Host memory that a run needs and that a node has.

    Attributes:
        bytes_per_rank: Host memory of the highest rank.
        bytes_per_node: Host memory of all ranks of a node.
        node_bytes: Memory of a node; None if ``hardware`` does not define it.
        fits: Whether a node has enough memory, with the margin; None if unknown.
    """

    bytes_per_rank: int
    bytes_per_node: int
    node_bytes: int | None
    fits: bool | None


@dataclass(frozen=True)
class Remedy:
    """A change that makes a run fit.

    Attributes:
        overrides: Overrides to add to the command.
        costs: Description of the cost of each setting.
        process_bytes: Device memory of the highest rank after the change.
        host_memory: Host memory after the change; None if the run uses none.
    """

    overrides: list[str]
    costs: list[str]
    process_bytes: int
    host_memory: HostMemory | None = None


@dataclass(frozen=True)
class Searched:
    """Result of a search for remedies.

    Attributes:
        untried: Overrides of the changes that may fit but were not estimated before the time limit.
        seconds: Duration of the search.
        reason: Reason why the search was impossible; empty otherwise.
    """

    untried: Sequence[str]
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class RoutingForecast:
    """Memory of a run with divided experts, for one assumed load of the rank with the most tokens.

    Attributes:
        routing: Value of ``estimate.routing``.
        load: Tokens of that rank relative to a balanced router; None for as many as possible.
        estimate: Estimated memory with this load.
        verdict: Whether the run fits a device; None without ``hardware``.
        change: The cheapest change that makes it fit; None if it fits or none was found.
    """

    routing: str
    load: float | None
    estimate: Estimate
    verdict: FitVerdict | None
    change: Remedy | None = None


@dataclass(frozen=True)
class Forecast:
    """An estimate with the information that is reported to the user.

    Attributes:
        layout: Description of the layout.
        workload: Workload of a step.
        estimate: Estimated memory.
        hardware: Name of the hardware, if configured.
        memory_bytes: Memory of one device.
        margin: Fraction by which the estimate may be too low.
        host_memory: Host memory of the run; None if it uses none.
        states_only: Whether activations, messages and temporaries are missing from the estimate.
        notes: Differences between the estimate and the run.
        measured: Configured keys of ``hardware`` for the memory outside torch's allocator.
        changes: Changes that make the run fit; empty if they were not searched.
        untried: Overrides of the changes that may fit but were not estimated before the time limit.
        routings: Memory for each load of the experts; empty if experts are not divided.
        training: Duration and cost of training; None if no number of tokens was given.
    """

    layout: str
    workload: Workload
    estimate: Estimate
    hardware: str | None
    memory_bytes: int | None
    margin: float
    host_memory: HostMemory | None
    states_only: bool
    notes: list[str]
    measured: tuple[str, ...] = ()
    changes: tuple[Remedy, ...] = ()
    untried: Sequence[str] = ()
    routings: tuple[RoutingForecast, ...] = ()
    training: TrainingForecast | None = None

    @property
    def verdict(self) -> FitVerdict | None:
        """Whether the run fits a device and the host; None if unknown."""
        if self.host_memory is not None and self.host_memory.fits is False:
            return "too_large"
        if self.memory_bytes is None:
            return None
        fits = verdict(self.estimate.process_bytes, memory=self.memory_bytes, margin=self.margin)
        return None if self.states_only and fits != "too_large" else fits

    @property
    def fits(self) -> bool | None:
        """Whether the run fits a device and the host, with the margin; None if unknown."""
        return None if self.verdict is None else self.verdict == "fits"


@dataclass(frozen=True)
class Planned:
    """A layout that a search has traced.

    Attributes:
        overrides: Overrides that select the layout.
        layout: Description of the layout.
        mesh: Number of ranks along each axis, outermost first.
        peak_bytes: Peak of the tensors on the highest rank.
        host_bytes: Peak of offloaded host memory on any rank.
        process_bytes: Device memory of the process with the highest peak.
        verdict: Whether ``process_bytes`` fits the device, with the margin.
        tokens_per_s_per_device: Trained tokens per second and device, or samples if they are not
            sequences.
        step_s: Seconds per step.
        mfu: Model FLOPs utilization; None if samples are not sequences.
        breakdown: Seconds of a step by activity.
        host_memory: Host memory of the run; None if it uses none.
        training: Duration and cost of training; None if no number of tokens was given.
        saved_bytes: Bytes of a checkpoint.
        numerics: Descriptions of the settings that change the numerics of the run.
        rank_factor: Factor of ``step_s`` by which layouts are ranked; above 1 with offload.
    """

    overrides: list[str]
    layout: str
    mesh: dict[str, int]
    peak_bytes: int
    host_bytes: int
    process_bytes: int
    verdict: FitVerdict
    tokens_per_s_per_device: float
    step_s: float
    mfu: float | None
    breakdown: dict[str, float]
    host_memory: HostMemory | None = None
    training: TrainingForecast | None = None
    saved_bytes: int = 0
    numerics: list[str] = field(default_factory=list)
    rank_factor: float = 1.0

    @property
    def ranked_s(self) -> float:
        """Seconds by which layouts are ranked."""
        return self.step_s * self.rank_factor

    @property
    def fits(self) -> bool:
        """Whether the device and the host have enough memory, with the margin."""
        return self.verdict == "fits" and not self.needs_more_host

    @property
    def needs_more_host(self) -> bool:
        """Whether a node is known to have too little host memory."""
        return self.host_memory is not None and self.host_memory.fits is False


@dataclass(frozen=True)
class CompiledLayout:
    """The first layout of a plan with compiled blocks.

    Attributes:
        overrides: Overrides to add to those of the layout.
        step_s: Seconds per step. How kernels are fused is not traced.
    """

    overrides: list[str]
    step_s: float


@dataclass(frozen=True)
class Plan:
    """Result of a search for layouts.

    Attributes:
        workload: Workload of a step, without the searched settings.
        searched: Number of layouts considered.
        candidates: Estimated layouts in their rank, with the first one that fits at the front.
        assumed: Figures of the hardware that are not published, and the assumed values.
        untraced: Number of layouts that may fit and be faster than the first one by formulas, but
            were not traced.
        typical: Keys of memory outside torch's allocator for which typical figures stand.
        not_tried: Allowed changes of numerics that the run can't use, with the reason.
        nodes: Nodes of every layout.
        imbalance: Assumed tokens of the rank with the most, relative to the mean, in layouts that
            split experts over ranks; None if none does.
        compiled: The first layout with compiled blocks; None if that is not possible or not worth
            it.
    """

    workload: Workload
    searched: int
    candidates: list[Planned]
    assumed: dict[str, float] = field(default_factory=dict)
    untraced: int = 0
    typical: tuple[str, ...] = ()
    not_tried: tuple[str, ...] = ()
    nodes: RunNodes = field(default_factory=RunNodes)
    imbalance: float | None = None
    compiled: CompiledLayout | None = None
