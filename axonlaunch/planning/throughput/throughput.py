"""Estimates the training speed of a run on given hardware from the operations of its step.

A model that cannot be traced is an error, and so is hardware without the required figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from axonlaunch.config import RunConfig, with_values
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.planning.throughput.roofline import figure
from axonlaunch.planning.throughput.step_time import StepTime
from axonlaunch.planning.throughput.step_work import StepWork, step_work


@dataclass(frozen=True)
class Throughput:
    """Speed of a run.

    Attributes:
        step_s: Seconds per optimizer step.
        tokens_per_s_per_device: Trained tokens per second and device, or samples per second and
            device if samples are not sequences.
        mfu: Model FLOPs utilization: fraction of the device's peak rate, without recomputation.
            None if samples are not sequences.
        breakdown: Seconds of a step by activity on the rank with the longest step.
        compiled_s: Seconds per optimizer step with ``train.compile=true``, for the same operations.
    """

    step_s: float
    tokens_per_s_per_device: float
    mfu: float | None
    breakdown: dict[str, float]
    compiled_s: float


def throughput(config: RunConfig, hardware: HardwareConfig) -> Throughput:
    """Estimate the speed of a run.

    Args:
        config: Checked configuration with ``launch.nproc`` resolved to the number of ranks.
        hardware: Description of each rank's device.

    Raises:
        ConfigError: The run cannot be traced, or the hardware lacks a figure.
    """
    return speed_of(config, hardware, step_work(config, world_size=num_ranks(config)))


def speed_of(config: RunConfig, hardware: HardwareConfig, work: StepWork) -> Throughput:
    """Estimate the speed of a run from the work of its step."""
    ranks = num_ranks(config)
    layout = Layout.of(config, world_size=ranks)
    times = StepTime(config, layout, hardware).parts(work)
    seconds = times.total
    compiled = with_values(config, {"train.compile": True})
    compiled_s = StepTime(compiled, layout, hardware).parts(work).total
    samples = layout.micro_batch_size * layout.micro_batches * layout.data_ranks
    rate = samples * work.sample_length / seconds / ranks
    mfu = None
    if work.sample_length > 1:
        train = config.train
        name = hardware.peak_figure(
            precision=train.precision, matmul_precision=train.matmul_precision
        )
        mfu = rate * work.flops_per_token / (figure(hardware, name) * 1e12)
    return Throughput(seconds, rate, mfu, dict(times), compiled_s)
