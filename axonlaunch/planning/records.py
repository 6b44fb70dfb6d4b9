"""What an estimate says, as plain records that a process without torch can read.

It holds numbers; ``memory`` finds them and ``report`` shows them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

FitVerdict: TypeAlias = Literal["fits", "tight", "too_large"]

if TYPE_CHECKING:
    from axonlaunch.planning.tracing.storage_trace import Category


@dataclass(frozen=True)
class RankEstimate:
    """What one rank holds; the ranks that differ from it on other axes than pp hold no more.

    Attributes:
        rank: The global rank.
        coords: Where it stands on each axis of the mesh.
        peak_bytes: Most bytes on its device in a steady step.
        host_bytes: Most bytes that it keeps offloaded in host memory.
        breakdown: What ``peak_bytes`` is made of, by category.
        sharded_parameters: ``FSDPMemoryStats`` of what fully_shard divides: ``current_bytes`` at
            rest, ``peak_bytes``, ``total_bytes``; None where nothing is.
        microbatch_bytes: Of each of its pipeline stages: activations that a micro-batch's forward
            leaves for its backward; [] without a pipeline.
        read_bytes: Most bytes of host memory that reading initial weights takes at once, beside
            what the rank holds; 0 where there are none to read.
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
    """What a run would hold.

    Attributes:
        world_size: Ranks.
        mesh: Ranks along each axis, outermost first.
        parameters: Of the whole model.
        peak_bytes: What tensors hold at most on the highest rank, of a GPU with the workspaces of
            its kernels: what ``torch.cuda.max_memory_allocated`` shows, but for rounding.
        reserved_bytes: What torch's allocator holds for them on a GPU; of a CPU, the same.
        process_bytes: What the process holds of the GPU: that, the driver's context and NCCL's
            buffers; of a CPU, ``peak_bytes``.
        ranks: One of each distinct pipeline stage.
        context_bytes: Of ``process_bytes`` the driver's context.
        communicator_bytes: Of ``process_bytes`` NCCL's buffers.
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
        """Most bytes that a rank keeps offloaded in host memory."""
        return max(rank.host_bytes for rank in self.ranks)

    @property
    def saved_bytes(self) -> int:
        """Most bytes on a rank's device that a checkpoint is made of: weights and states."""
        return max(
            rank.breakdown["parameters"] + rank.breakdown["optimizer"] for rank in self.ranks
        )


def verdict(num_bytes: float, *, memory: float, margin: float) -> FitVerdict:
    """Say whether an estimate fits a device of so many bytes, though it may be too low.

    With 0.1 for margin, 70 GiB fit 80 GiB, 75 are tight (82.5 may be needed), 81 are too large.

    Args:
        num_bytes: As estimated.
        memory: Of the device.
        margin: Share of ``num_bytes`` by which it may be too low.
    """
    if num_bytes <= memory / (1 + margin):
        return "fits"
    return "tight" if num_bytes <= memory else "too_large"


@dataclass(frozen=True)
class Workload:
    """What a step trains on, and how: figures without which an estimate means nothing.

    Attributes:
        global_batch_size: Samples of a step.
        micro_batch_size: Samples of one forward on one rank; None where it is searched for.
        sequence_length: Positions of a sample; None where it is no sequence.
        precision: Arithmetic of forward and backward.
        activation_checkpointing: What backward recomputes; None where it is searched for.
    """

    global_batch_size: int
    micro_batch_size: int | None
    sequence_length: int | None
    precision: str
    activation_checkpointing: str | None

    def __str__(self) -> str:
        """Return it in words, for the first line of a table."""
        facts = [f"batch {self.global_batch_size:,}"]
        if self.micro_batch_size is not None:
            facts[0] += f" (micro-batch {self.micro_batch_size:,})"
        if self.sequence_length is not None:
            facts.append(f"{self.sequence_length:,} positions")
        facts.append(self.precision)
        if self.activation_checkpointing is None:
            facts.append("recomputation as each layout says")
        else:
            kind = self.activation_checkpointing.replace("none", "no")
            facts.append(f"{kind} recomputation")
        return ", ".join(facts)


@dataclass(frozen=True)
class StepPrediction:
    """A step's time as ``plan`` predicts it.

    Attributes:
        hardware: Whose figures it follows from.
        step_s: Seconds of an optimizer step.
        parts: Seconds of it by what they go to, in the words of ``diagnostics.step_breakdown``.
        pipeline: One round of a pipeline: ``(rank of the pipeline, start, stop, action)`` in
            seconds, actions as ``2F0``: stage, kind, micro-batch; [] without one.
    """

    hardware: str
    step_s: float
    parts: dict[str, float]
    pipeline: list[tuple[int, float, float, str]] = field(default_factory=list)


@dataclass(frozen=True)
class HostMemory:
    """What a run keeps in host memory, and what there is.

    Attributes:
        bytes_per_rank: Of the highest rank.
        bytes_per_node: Of all ranks of a node.
        node_bytes: Memory of a node; None where ``hardware`` does not say.
        fits: Whether a node has that much, with the margin; None where it is not known.
    """

    bytes_per_rank: int
    bytes_per_node: int
    node_bytes: int | None
    fits: bool | None


@dataclass(frozen=True)
class Remedy:
    """A change after which a run fits.

    Attributes:
        overrides: What to write.
        costs: What it costs, in words, for each setting.
        process_bytes: Of the highest rank then.
        host_memory: What it then offloads; None where nothing is.
    """

    overrides: list[str]
    costs: list[str]
    process_bytes: int
    host_memory: HostMemory | None = None


@dataclass(frozen=True)
class Searched:
    """How a search for remedies ended.

    Attributes:
        untried: Changes that may fit and were not estimated when its time was over.
        seconds: How long it took.
        reason: Why none could be looked for; empty where they were.
    """

    untried: int
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class Forecast:
    """An estimate, and what a user wants to know of it.

    Attributes:
        layout: In words.
        workload: What a step trains on.
        estimate: What was found.
        hardware: Its name; None where none was named.
        memory_bytes: Of one of its devices.
        margin: Share of an estimate by which it may be too low.
        host_memory: What is offloaded; None where nothing is.
        states_only: Whether activations, messages and temporaries come on top of the estimate.
        notes: What the estimate is of, where it is not of the very run.
        measured: Keys of the hardware that say what its processes hold beside torch's allocator.
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

    @property
    def verdict(self) -> FitVerdict | None:
        """Whether it fits a device and the host; None where that can't be said."""
        if self.host_memory is not None and self.host_memory.fits is False:
            return "too_large"
        if self.memory_bytes is None:
            return None
        fits = verdict(self.estimate.process_bytes, memory=self.memory_bytes, margin=self.margin)
        return None if self.states_only and fits != "too_large" else fits

    @property
    def fits(self) -> bool | None:
        """Whether it fits a device with the margin; None where that can't be said."""
        return None if self.verdict is None else self.verdict == "fits"


@dataclass(frozen=True)
class Planned:
    """A layout that a search has traced.

    Attributes:
        overrides: What to write.
        layout: In words.
        mesh: Ranks along each axis, outermost first.
        peak_bytes: What tensors hold at most on the highest rank.
        host_bytes: What it keeps offloaded in host memory.
        process_bytes: What its process holds of the device.
        verdict: Whether that fits it, with the margin.
        tokens_per_s_per_device: Tokens trained on; samples, where a sample is no sequence.
        step_s: Seconds of a step.
        mfu: Share of the device's peak that the model needs; None where a sample is no sequence.
        breakdown: Seconds of a step by what they go to.
        host_memory: What it offloads; None where nothing is.
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

    @property
    def fits(self) -> bool:
        """Whether it fits with the margin, and so does what it offloads."""
        return self.verdict == "fits" and not self.needs_more_host

    @property
    def needs_more_host(self) -> bool:
        """Whether a node is known to have less host memory than it offloads."""
        return self.host_memory is not None and self.host_memory.fits is False


@dataclass(frozen=True)
class Plan:
    """What a search found.

    Attributes:
        workload: What a step trains on, but for what is searched.
        searched: Layouts that were looked at.
        candidates: Those that were traced, the fastest that fits first.
    """

    workload: Workload
    searched: int
    candidates: list[Planned]
