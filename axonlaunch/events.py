"""Records that the main rank of a run sends to its listeners while it trains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

_LARGEST_EXPONENT = 709.0


@dataclass(frozen=True)
class Started:
    """Every rank is ready for the first step.

    ``counted`` is what the loss counts: tokens, images or samples with one target each, or targets.
    ``samples`` is None if a stream does not know its length.
    """

    run_dir: str
    layout: str
    device: str
    parameters: int
    samples: int | None
    counted: Literal["tokens", "images", "samples", "targets"]
    step: int
    steps: int
    resumed_from: str | None
    corrupt: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for.

    Attributes:
        rank: Number of the slow rank.
        host: Host name of its node.
        data: Fraction of its time spent waiting for data.
        compute: Fraction spent computing.
        wait: Fraction spent waiting for other ranks.
        starved: Fraction in which it was ready to run, but other programs used the node's cores.
        cost: Fraction of the time by which it worked longer than the median of the other ranks.
    """

    rank: int
    host: str
    data: float
    compute: float
    wait: float
    starved: float
    cost: float


@dataclass(frozen=True)
class StepLogged:
    """A logged step, with the fields of a line of ``metrics.jsonl``.

    If the loss does not count tokens, files and loggers use ``images``, ``samples`` or ``targets``
    instead of ``tokens`` in these names (``system.text.units``).

    Attributes:
        step: Number of optimizer steps done.
        loss: Mean loss over the counted targets of all ranks.
        lr: Learning rate of the step.
        grad_norm: Gradient norm before clipping; None if it is not computed.
        tokens: Counted targets in the step, of all ranks.
        tokens_per_s: Counted targets per second since the last logged step.
        step_s: Mean seconds per step since the last logged step.
        peak_memory_bytes: Peak memory of this rank so far.
        epoch: Number of passes over the training samples by the end of the step; None if a stream
            does not know its length.
        tokens_seen: Counted targets in all steps so far; None if the run resumed from a checkpoint
            without this count.
        data_wait_s: Part of ``step_s`` in which the main rank waited for data.
        slowest: The rank that the others wait for; None if it is unknown.
        skipped: Updates skipped since the last logged step because fp16 gradients overflowed; None
            in other precisions.
        loss_scale: Factor of the next step's loss in fp16; None in other precisions.
        mfu: Fraction of the devices' dense peak FLOP/s that the model uses, counted by
            ``models.facts.flops`` for all positions including padding. None on a CPU, or if
            the peak is unknown.
        reserved_bytes: Peak memory that this rank's allocator has reserved on its device.
        active_bytes: Peak memory of blocks that are in use or that streams still wait for.
        alloc_retries: Number of times that the allocator emptied its cache to find memory.
        power_w: Power of the device in watts.
        utilization: Fraction of time in which a kernel ran on the device.
        temperature_c: Temperature of the device in degrees Celsius.
        expert_load: Largest number of tokens of an expert in the step, divided by the mean over
            the experts of its layer; the largest of all layers. None without experts.
        expert_loads: ``expert_load`` of each layer with experts, by the number of its block.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens: int
    tokens_per_s: float
    step_s: float
    peak_memory_bytes: int
    epoch: float | None
    tokens_seen: int | None
    data_wait_s: float = 0.0
    slowest: Straggler | None = None
    skipped: int | None = None
    loss_scale: float | None = None
    mfu: float | None = None
    reserved_bytes: int | None = None
    active_bytes: int | None = None
    alloc_retries: int | None = None
    power_w: float | None = None
    utilization: float | None = None
    temperature_c: float | None = None
    expert_load: float | None = None
    expert_loads: Mapping[str, float] | None = None


@dataclass(frozen=True)
class RankTimes:
    """How each rank spent its time since the last report, as fractions.

    Attributes:
        step: Number of optimizer steps done.
        hosts: Host name of each rank.
        data: Fraction of each rank's time spent waiting for data.
        compute: Fraction spent computing.
        wait: Fraction spent waiting for other ranks.
        starved: Fraction spent waiting for a core of the node.
    """

    step: int
    hosts: tuple[str, ...]
    data: tuple[float, ...]
    compute: tuple[float, ...]
    wait: tuple[float, ...]
    starved: tuple[float, ...]


@dataclass(frozen=True)
class StepDone:
    """A step that was not logged."""

    step: int


@dataclass(frozen=True)
class Evaluated:
    """Mean loss over the held-out samples, in nats per target.

    Attributes:
        perplexity: Perplexity of tokens; None for classes.
        sources: Loss on each source of a mix, by name.
        metrics: Value of each metric, by name.
    """

    step: int
    eval_loss: float
    eval_tokens: int
    unigram_entropy: float | None
    perplexity: float | None = None
    sources: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def perplexity_of(loss: float) -> float:
    """Return the perplexity of a loss in nats per token, limited to the range of a float."""
    return math.exp(min(loss, _LARGEST_EXPONENT))


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint.

    Attributes:
        step: Step of the checkpoint.
        path: Folder of the checkpoint.
        seconds: Duration of the save.
        stalled_s: Part of ``seconds`` in which training waited.
    """

    step: int
    path: str
    seconds: float
    stalled_s: float


@dataclass(frozen=True)
class Noted:
    """A message for the user that does not end the run."""

    text: str


@dataclass(frozen=True)
class Finished:
    """The end of a run, after its last step or an interruption.

    On a CPU, the peak is the memory of tensors in the second step; None if it was not measured.
    ``metrics`` has the values of the last evaluation's metrics by name.
    """

    step: int
    interrupted: bool
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    peak_memory_bytes: int | None
    metrics: dict[str, float] = field(default_factory=dict)


def merge_finished(finished: Sequence[Finished]) -> Finished:
    """Return the report of the main rank (the first), with the highest peak of all ranks."""
    peaks = [rank.peak_memory_bytes for rank in finished if rank.peak_memory_bytes is not None]
    return dataclasses.replace(finished[0], peak_memory_bytes=max(peaks, default=None))


class PhaseReporter(Protocol):
    """Receives the phase that a rank begins and its number of finished optimizer steps."""

    def __call__(self, phase: str, *, step: int | None) -> None:
        """Record the phase."""


def ignore_heartbeat(phase: str, *, step: int | None) -> None:
    """Discard a phase."""
    del phase, step


Event = Started | StepLogged | StepDone | RankTimes | Evaluated | Saved | Noted | Finished
Listener = Callable[[Event], None]
"""Receives events when they happen."""


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """Callbacks between a rank and the process that monitors it; the defaults do nothing.

    Attributes:
        report: Receives the rank's events.
        report_phase: Receives the phases that the rank begins.
        stop: Returns whether the rank should stop after its current step.
    """

    report: Listener = lambda event: None
    report_phase: PhaseReporter = ignore_heartbeat
    stop: Callable[[], bool] = lambda: False


NULL_MONITOR = Monitor()
