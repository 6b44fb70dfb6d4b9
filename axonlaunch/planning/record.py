"""What an estimate says, as plain records that a process without torch can read.

It holds numbers; ``memory`` finds them and ``report`` shows them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from axonlaunch.planning.trace import Category


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
    """

    rank: int
    coords: dict[str, int]
    peak_bytes: int
    host_bytes: int
    breakdown: dict[Category, int]
    sharded_parameters: dict[str, int] | None = None
    microbatch_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Estimate:
    """What a run would hold.

    Attributes:
        world_size: Ranks.
        mesh: Ranks along each axis, outermost first.
        parameters: Of the whole model.
        peak_bytes: What tensors hold at most on the highest rank.
        reserved_bytes: What torch's allocator holds for them on a GPU; of a CPU, the same.
        process_bytes: What the process holds of the GPU: that, the driver's context and NCCL's
            buffers; of a CPU, ``peak_bytes``.
        fits: Whether that fits the hardware's device; None where its memory is not known.
        ranks: One of each distinct pipeline stage.
    """

    world_size: int
    mesh: dict[str, int]
    parameters: int
    peak_bytes: int
    reserved_bytes: int
    process_bytes: int
    fits: bool | None
    ranks: list[RankEstimate]


@dataclass(frozen=True)
class Remedy:
    """A change after which a run fits.

    Attributes:
        overrides: What to write.
        costs: What it costs, in words, for each setting.
        process_bytes: Of the highest rank then.
    """

    overrides: list[str]
    costs: list[str]
    process_bytes: int


@dataclass(frozen=True)
class Forecast:
    """An estimate, and what a user wants to know of it.

    Attributes:
        layout: In words.
        estimate: What was found.
        hardware: Its name; None where none was named.
        memory_bytes: Of one of its devices.
        remedies: Where it does not fit, what would make it.
        notes: What the estimate is of, where it is not of the very run.
    """

    layout: str
    estimate: Estimate
    hardware: str | None
    memory_bytes: int | None
    remedies: list[Remedy]
    notes: list[str]


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
        fits: Whether that fits it.
        tokens_per_s_per_device: Tokens trained on; samples, where a sample is no sequence.
        step_s: Seconds of a step.
        mfu: Share of the device's peak that the model needs; None where a sample is no sequence.
        breakdown: Seconds of a step by what they go to.
    """

    overrides: list[str]
    layout: str
    mesh: dict[str, int]
    peak_bytes: int
    host_bytes: int
    process_bytes: int
    fits: bool
    tokens_per_s_per_device: float
    step_s: float
    mfu: float | None
    breakdown: dict[str, float]


@dataclass(frozen=True)
class Plan:
    """What a search found.

    Attributes:
        searched: Layouts that were looked at.
        candidates: Those that were traced, the fastest that fits first.
    """

    searched: int
    candidates: list[Planned]
