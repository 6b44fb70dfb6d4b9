"""How long a device takes for one operation: its rates, its bandwidth, its smallest kernel.

It refuses to time what a figure is not published for. What a device waits for others is in
``collectives``.

Source: Williams, Waterman, Patterson, "Roofline", 2009; NVIDIA, "Matrix Multiplication Background
User's Guide", for tiles and waves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.hardware import HardwareConfig
from axonlaunch.planning.measured_constants import (
    HALF_DEPTH,
    HALF_LENGTH,
    HALF_WAVE,
    IN_A_STEP,
)
from axonlaunch.planning.throughput.operations import (
    Amount,
    AttentionOp,
    Kernel,
    Operation,
    Product,
)

_TILE = (128, 256)
"""Rows and columns of the largest tile that cuBLAS gives one multiprocessor (NVIDIA's guide)."""

_RATES = {
    torch.float32: "fp32_tflops",
    torch.float16: "fp16_tflops",
    torch.bfloat16: "bf16_tflops",
}


class Roofline:
    """Times of a device's operations."""

    def __init__(self, hardware: HardwareConfig, *, matmul_precision: str = "highest") -> None:
        """Take a device's figures.

        Args:
            hardware: The figures.
            matmul_precision: ``train.matmul_precision``, that of products in fp32.
        """
        self._hardware = hardware
        self._fp32_products = hardware.peak_figure(
            precision="fp32", matmul_precision=matmul_precision
        )

    def figure(self, name: str) -> Any:
        """Return a figure of the hardware.

        Raises:
            ConfigError: It is not published.
        """
        return figure(self._hardware, name)

    def seconds(self, operation: Operation, amount: Amount) -> float:
        """Return the time of all runs of an operation on this device alone, in seconds."""
        if isinstance(operation, Product):
            return float(amount.count * self._product(operation))
        if isinstance(operation, AttentionOp):
            return self._attention(operation, amount)
        if isinstance(operation, Kernel):
            return self._moving_all(amount) + amount.count * self._launch_s
        return 0.0

    def rate(self, dtype: torch.dtype) -> float:
        """Return the matrix peak of a type, FLOP/s, for kernels that multiply as they see fit."""
        return float(self.figure(_RATES.get(dtype, "fp32_tflops"))) * 1e12

    def _product_rate(self, dtype: torch.dtype) -> float:
        """Return the peak of cuBLAS's products, FLOP/s; they alone use TF32 where it is allowed."""
        if dtype is torch.float32:
            return float(self.figure(self._fp32_products)) * 1e12
        return self.rate(dtype)

    def _product(self, product: Product) -> float:
        """Time one matrix product.

        Waves of tiles and their depth leave a share of the rate, waves / (waves + 0.1) and
        k / (k + 64); it is smooth because cuBLAS chooses among tile sizes and cuts the depth where
        waves are few.
        """
        batch, m, n, k = product.batch, product.m, product.n, product.k
        tiles = batch * -(-m // _TILE[0]) * -(-n // _TILE[1])
        waves = tiles / self.figure("multiprocessors")
        share = waves / (waves + HALF_WAVE) * k / (k + HALF_DEPTH)
        peak = self._product_rate(product.dtype)
        rate = peak * self.figure("matrix_efficiency") * share * IN_A_STEP
        moved = batch * (m * k + k * n + m * n) * product.dtype.itemsize
        return float(max(2.0 * batch * m * n * k / rate, self._moving(moved)) + self._launch_s)

    def _attention(self, attention: AttentionOp, amount: Amount) -> float:
        share = attention.keys / (attention.keys + HALF_LENGTH)
        rate = self.rate(attention.dtype) * self.figure("attention_efficiency") * share
        moving = self._moving_all(amount)
        return float(max(amount.flops / rate, moving) + amount.count * self._launch_s)

    @property
    def _launch_s(self) -> float:
        return self._hardware.kernel_us * 1e-6

    def _moving_all(self, amount: Amount) -> float:
        """Return the time of the traffic of all runs of a kernel, taken as alike."""
        count = max(1.0, amount.count)
        return count * self._moving(amount.num_bytes / count)

    def _moving(self, num_bytes: float) -> float:
        """Return the time of one kernel's traffic: at a bandwidth, or as measured by size."""
        sizes, times = self._hardware.kernel_bytes, self._hardware.kernel_latency_us
        if sizes:
            if num_bytes >= sizes[-1]:
                return times[-1] * 1e-6 * num_bytes / sizes[-1]
            points = list(zip([0.0, *sizes], [0.0, *times], strict=True))
            for (low, before), (high, after) in itertools.pairwise(points):
                if num_bytes < high:
                    part = (num_bytes - low) / (high - low)
                    return (before + part * (after - before)) * 1e-6
        bandwidth = self.figure("memory_bandwidth_gb_s") * 1e9 * self.figure("memory_efficiency")
        return float(num_bytes / bandwidth)


def figure(hardware: HardwareConfig, name: str) -> Any:
    """Return a figure of the hardware.

    Raises:
        ConfigError: It is not published.
    """
    refuse_missing(hardware, [name])
    return getattr(hardware, name)


def refuse_missing(hardware: HardwareConfig, names: Iterable[str]) -> None:
    """Raise for figures that are not published, all at once.

    Raises:
        ConfigError: It says which.
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
