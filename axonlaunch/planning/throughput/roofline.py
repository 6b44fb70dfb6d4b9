"""Estimates the time of one operation from a device's peak rates, bandwidth and launch latency.

A figure that is missing from the hardware configuration is an error. Communication is in
``collectives``.

Source: Williams, Waterman, Patterson, "Roofline", 2009; NVIDIA, "Matrix Multiplication Background
User's Guide", for tiles and waves.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import torch

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.config.precision import FP32
from axonlaunch.models.torch_dtypes import peak_of
from axonlaunch.planning.measured_constants import (
    HALF_DEPTH,
    HALF_LENGTH,
    HALF_WAVE,
    HOST_WAIT_S,
    IN_A_STEP,
)
from axonlaunch.planning.throughput.operations import (
    Amount,
    AttentionOp,
    HostWait,
    Kernel,
    Operation,
    Product,
    Rounding,
)

_TILE = (128, 256)
"""Rows and columns of the largest cuBLAS tile for one multiprocessor (NVIDIA's guide)."""


class Roofline:
    """Times of the operations of a device."""

    def __init__(self, hardware: HardwareConfig, *, matmul_precision: str = "highest") -> None:
        """Take the figures of a device.

        Args:
            hardware: Description of the device.
            matmul_precision: Value of ``train.matmul_precision``, for fp32 matrix products.
        """
        self._hardware = hardware
        self._fp32_products = hardware.peak_figure(
            precision=FP32.name, matmul_precision=matmul_precision
        )

    def figure(self, name: str) -> Any:
        """Return a figure of the hardware.

        Raises:
            ConfigError: The figure is not published.
        """
        return figure(self._hardware, name)

    def seconds(self, operation: Operation, amount: Amount) -> float:
        """Return the time of all runs of an operation in seconds; 0 for communication."""
        if isinstance(operation, Product):
            return float(amount.count * self._product_time(operation))
        if isinstance(operation, AttentionOp):
            return self._attention_time(operation, amount)
        if isinstance(operation, Kernel):
            return self._total_traffic_time(amount) + amount.count * self._launch_s
        if isinstance(operation, Rounding):
            kernels = amount.count * operation.kernels
            separate = dataclasses.replace(amount, count=kernels)
            return self._total_traffic_time(separate) + kernels * self._launch_s
        if isinstance(operation, HostWait) and not self._hardware.is_cpu:
            return float(amount.count * HOST_WAIT_S)
        return 0.0

    def fused_seconds(self, operation: Rounding, amount: Amount) -> float:
        """Return the time of all runs of a rounding in compiled code.

        Source: torchao's float8 training, docs/source/workflows/training.md: with torch.compile
        Llama-3 8B trains 1.25 times as fast as in bf16 on 8 H100 (7,690 and 6,150 tokens/s for
        each, 8,192 tokens, tensorwise). Separate kernels, of 21 bytes or more for each number,
        would take most of that.
        """
        once = sum(
            self._traffic_time(traffic) + self._launch_s for traffic in operation.fused_bytes
        )
        return amount.count * once

    def rate(self, dtype: torch.dtype) -> float:
        """Return the peak rate for a type in FLOP/s, regardless of TF32 settings."""
        return float(self.figure(peak_of(dtype))) * 1e12

    def _product_rate(self, dtype: torch.dtype) -> float:
        """Return the peak rate of cuBLAS products in FLOP/s, with TF32 if it is allowed."""
        if dtype is torch.float32:
            return float(self.figure(self._fp32_products)) * 1e12
        return self.rate(dtype)

    def _product_time(self, product: Product) -> float:
        """Return the time of one matrix product.

        The peak rate is reduced by waves / (waves + 0.1) for the number of waves of tiles, and by
        k / (k + 64) for their depth. These factors are smooth because cuBLAS chooses among several
        tile sizes, and splits the depth if there are few waves.
        """
        batch, m, n, k = product.batch, product.m, product.n, product.k
        waves = num_waves(batch, m, n, self.figure("multiprocessors"))
        share = waves / (waves + HALF_WAVE) * k / (k + HALF_DEPTH)
        peak = self._product_rate(product.dtype)
        rate = peak * self.figure("matrix_efficiency") * share * IN_A_STEP
        traffic_time = self._traffic_time(product.num_bytes)
        return float(max(2.0 * batch * m * n * k / rate, traffic_time) + self._launch_s)

    def _attention_time(self, attention: AttentionOp, amount: Amount) -> float:
        share = attention.keys / (attention.keys + HALF_LENGTH)
        rate = self.rate(attention.dtype) * self.figure("attention_efficiency") * share
        traffic_time = self._total_traffic_time(amount)
        return float(max(amount.flops / rate, traffic_time) + amount.count * self._launch_s)

    @property
    def _launch_s(self) -> float:
        return self._hardware.kernel_us * 1e-6

    def _total_traffic_time(self, amount: Amount) -> float:
        """Return the time of the memory traffic of all runs of a kernel, with equal runs."""
        count = max(1.0, amount.count)
        return count * self._traffic_time(amount.num_bytes / count)

    def _traffic_time(self, num_bytes: float) -> float:
        """Return the time of one kernel's memory traffic, from measured times or the bandwidth."""
        sizes, times = self._hardware.kernel_bytes, self._hardware.kernel_latency_us
        if sizes:
            if num_bytes >= sizes[-1]:
                return times[-1] * 1e-6 * num_bytes / sizes[-1]
            points = list(zip([0.0, *sizes], [0.0, *times], strict=True))
            for (low_size, low_time), (high_size, high_time) in itertools.pairwise(points):
                if num_bytes < high_size:
                    fraction = (num_bytes - low_size) / (high_size - low_size)
                    return (low_time + fraction * (high_time - low_time)) * 1e-6
        bandwidth = self.figure("memory_bandwidth_gb_s") * 1e9 * self.figure("memory_efficiency")
        return float(num_bytes / bandwidth)


def num_waves(batch: int, m: int, n: int, multiprocessors: int) -> float:
    """Return the number of waves of tiles in which multiprocessors compute a product."""
    return batch * -(-m // _TILE[0]) * -(-n // _TILE[1]) / multiprocessors


def figure(hardware: HardwareConfig, name: str) -> Any:
    """Return a figure of the hardware.

    Raises:
        ConfigError: The figure is not published.
    """
    if (value := getattr(hardware, name)) is None:
        refuse_missing(hardware, [name])
    return value


def refuse_missing(hardware: HardwareConfig, names: Iterable[str]) -> None:
    """Raise one error for all figures that are not published.

    Raises:
        ConfigError: At least one of the figures is missing; the error names all of them.
    """
    missing = [name for name in names if getattr(hardware, name) is None]
    if missing:
        raise ConfigError([_missing(hardware, name) for name in missing])


def _missing(hardware: HardwareConfig, name: str) -> ConfigIssue:
    message = (
        f"is not published for {hardware.name}, and speed can't be estimated without it; "
        f"write hardware.{name}=NUMBER, measured or from a datasheet"
    )
    return ConfigIssue(f"hardware.{name}", message, None)
