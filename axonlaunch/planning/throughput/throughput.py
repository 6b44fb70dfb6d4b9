"""How fast a run would train on hardware of a kind, from what its step does.

It refuses what can't be traced and hardware without the figures it takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from axonlaunch.config import RunConfig
from axonlaunch.config.hardware import HardwareConfig
from axonlaunch.config.layout import Layout, num_ranks
from axonlaunch.planning.throughput.roofline import figure
from axonlaunch.planning.throughput.step_time import StepTime
from axonlaunch.planning.throughput.step_work import StepWork, step_work


@dataclass(frozen=True)
class Throughput:
    """The speed of a run.

    Attributes:
        step_s: Seconds of an optimizer step.
        tokens_per_s_per_device: Tokens trained on a second and device; samples, where a sample is
            no sequence.
        mfu: Share of the device's peak that the model itself needs, recomputation not counted;
            None where a sample is no sequence.
        breakdown: Seconds of a step by what they go to, of the rank that has most to do.
    """

    step_s: float
    tokens_per_s_per_device: float
    mfu: float | None
    breakdown: dict[str, float]


def throughput(config: RunConfig, hardware: HardwareConfig) -> Throughput:
    """Estimate the speed of a run.

    Args:
        config: Checked, with ``launch.nproc`` resolved: the ranks of the world.
        hardware: What each rank has.

    Raises:
        ConfigError: The run can't be traced, or the hardware lacks a figure.
    """
    return speed_of(config, hardware, step_work(config, world_size=num_ranks(config)))


def speed_of(config: RunConfig, hardware: HardwareConfig, work: StepWork) -> Throughput:
    """Estimate the speed of a run whose work is known."""
    ranks = num_ranks(config)
    layout = Layout.of(config, world_size=ranks)
    times = StepTime(config, layout, hardware).parts(work)
    seconds = times.total
    samples = layout.micro_batch_size * layout.micro_batches * layout.data_ranks
    rate = samples * work.sample_length / seconds / ranks
    mfu = None
    if work.sample_length > 1:
        train = config.train
        name = hardware.peak_figure(
            precision=train.precision, matmul_precision=train.matmul_precision
        )
        mfu = rate * work.flops_per_token / (figure(hardware, name) * 1e12)
    return Throughput(seconds, rate, mfu, dict(times))
