"""What a run reports while it trains: plain records, sent by the main rank to whoever shows them.

It holds the records; nothing here shows or writes them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

_LARGEST_EXPONENT = 709.0


@dataclass(frozen=True)
class Started:
    """Every rank is ready; the next thing is the first step.

    What is counted is what has a target each: tokens, of images the image. A stream need not say
    how many samples it has.
    """

    run_dir: str
    layout: str
    device: str
    parameters: int
    samples: int | None
    counted: Literal["tokens", "images", "samples"]
    step: int
    steps: int
    resumed_from: str | None
    corrupt: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for.

    Attributes:
        rank: Which.
        host: Its host name.
        data: Share of its time in which it waited for data.
        compute: In which it computed.
        wait: In which it waited for others.
        starved: In which it was ready to run and its node, which others use too, gave it no core.
        cost: By how much of the time it worked longer than the median of the others.
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
    """A step that was logged; the fields are those of a line of ``metrics.jsonl``.

    Where targets are images or other samples, files and loggers have ``images`` or ``samples`` in
    place of ``tokens`` in these names (``system.units``).

    Attributes:
        step: Optimizer steps done.
        loss: Mean over the counted targets of the world.
        lr: Of the step.
        grad_norm: Before clipping; None: nobody asked.
        tokens: Targets of the step that counted, of all ranks.
        tokens_per_s: Such targets of all steps since the last logged one, a second.
        step_s: Seconds of a step, on average since the last logged one.
        peak_memory_bytes: Of this rank, so far.
        epoch: How often the training samples were seen by the end of the step; None: a stream does
            not say how many it has.
        tokens_seen: Targets that counted in all steps up to this one; None where the run resumed
            from a checkpoint that does not say how many there were.
        data_wait_s: Of ``step_s``, for how long the main rank waited for data.
        slowest: The rank that others wait for; None: none was seen.
        skipped: Updates that fp16 left out since the last logged step, as gradients overflowed;
            None in another precision.
        loss_scale: What fp16 multiplies the next step's loss by; None in another precision.
        mfu: Fraction of the devices' dense peak that the model needs, as ``models.flops`` counts
            it for all positions, padding included. None on a CPU, or if the peak is not known.
        reserved_bytes: The most that this rank's allocator has reserved of its device.
        active_bytes: The most that was in blocks which are in use, or whose streams are not done.
        alloc_retries: How often the allocator has emptied its cache to find room.
        power_w: Watts that the device draws.
        utilization: Share of time in which a kernel ran on the device.
        temperature_c: Of the device, degrees Celsius.
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


@dataclass(frozen=True)
class RankTimes:
    """What each rank did with its time in the steps since the last report, in shares of it.

    Attributes:
        step: Optimizer steps done.
        hosts: Host name of each rank.
        data: Share of each rank's time in which it waited for data.
        compute: In which it computed.
        wait: In which it waited for others.
        starved: In which its node gave it no core.
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
    """Mean loss over the held-out samples, in nats a target.

    Attributes:
        perplexity: Of tokens; None of classes.
        sources: The loss on each source of a mix, by its name.
    """

    step: int
    eval_loss: float
    eval_tokens: int
    unigram_entropy: float | None
    perplexity: float | None = None
    sources: dict[str, float] = field(default_factory=dict)


def perplexity_of(loss: float) -> float:
    """Return the perplexity of a loss in nats a token; what no float holds is the largest one."""
    return math.exp(min(loss, _LARGEST_EXPONENT))


@dataclass(frozen=True)
class Saved:
    """A checkpoint is complete; for how much of its time training stood still."""

    step: int
    path: str
    seconds: float
    stalled_s: float


@dataclass(frozen=True)
class Noted:
    """Something that a user should know and that does not end the run."""

    text: str


@dataclass(frozen=True)
class Finished:
    """The run's end, after its last step or an interruption.

    On a CPU the peak is what tensors held in the second step; None where that was not watched.
    """

    step: int
    interrupted: bool
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    peak_memory_bytes: int | None


def merge_finished(finished: Sequence[Finished]) -> Finished:
    """Return what the main rank, the first, reports, with the peak of the highest."""
    peaks = [rank.peak_memory_bytes for rank in finished if rank.peak_memory_bytes is not None]
    return dataclasses.replace(finished[0], peak_memory_bytes=max(peaks, default=None))


class PhaseReporter(Protocol):
    """Takes what a rank begins to do, and how many optimizer steps it has done by then."""

    def __call__(self, phase: str, *, step: int | None) -> None:
        """Note it."""


def ignore_heartbeat(phase: str, *, step: int | None) -> None:
    """Report a phase to nobody."""
    del phase, step


Event = Started | StepLogged | StepDone | RankTimes | Evaluated | Saved | Noted | Finished
Listener = Callable[[Event], None]
"""Takes events as they happen."""


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """Who follows a rank from outside; the default is nobody.

    Attributes:
        report: Takes the rank's events.
        report_phase: Takes what the rank begins to do.
        stop: Whether the rank was asked to stop after its step.
    """

    report: Listener = lambda event: None
    report_phase: PhaseReporter = ignore_heartbeat
    stop: Callable[[], bool] = lambda: False


NOBODY = Monitor()
