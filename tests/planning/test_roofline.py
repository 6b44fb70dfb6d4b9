from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from axonlaunch.config import ConfigError
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.planning.throughput.operations import (
    Amount,
    AttentionOp,
    Kernel,
    Product,
    Rounding,
)
from axonlaunch.planning.throughput.roofline import Roofline

HARDWARE = HardwareConfig(
    name="round",
    fp32_tflops=10,
    bf16_tflops=100,
    matrix_efficiency=0.8,
    attention_efficiency=0.5,
    multiprocessors=100,
    memory_bandwidth_gb_s=1000,
    memory_efficiency=0.9,
)


def product(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Product:
    return Product("forward", 1, m, n, k, dtype)


def rate(key: Product) -> float:
    """Return FLOP/s as a fraction of the peak."""
    seconds = Roofline(HARDWARE).seconds(key, Amount(1))
    peak = 1e14 if key.dtype is torch.bfloat16 else 1e13
    return 2.0 * key.m * key.n * key.k / seconds / peak


def test_large_products_reach_at_most_sustained_rate() -> None:
    sustained = 0.8 * 0.75  # the kernel's efficiency, times the fraction of it in a training step
    assert 0.99 * sustained < rate(product(65536, 16384, 16384)) <= sustained


def test_products_with_few_tiles_or_little_depth_are_slower() -> None:
    full = rate(product(8192, 8192, 8192))
    assert rate(product(8192, 256, 8192)) < full
    assert rate(product(256, 8192, 8192)) < full
    assert rate(product(8192, 8192, 64)) < full


def test_thin_products_are_memory_bound() -> None:
    key = product(8192, 8, 8192)
    moved = 2 * (8192 * 8192 + 2 * 8 * 8192)
    assert Roofline(HARDWARE).seconds(key, Amount(1)) >= moved / 0.9e12


def test_each_dtype_has_its_rate() -> None:
    single, half = product(8192, 8192, 8192, torch.float32), product(8192, 8192, 8192)
    assert rate(single) == pytest.approx(rate(half), rel=0.01)


@pytest.mark.parametrize(("precision", "times"), [("highest", 1), ("high", 5), ("medium", 5)])
def test_products_in_fp32_have_the_rate_of_tf32_where_that_is_allowed(
    precision: str, times: int
) -> None:
    hardware = replace(HARDWARE, tf32_tflops=50, kernel_us=1e-9)
    roofline = Roofline(hardware, matmul_precision=precision)
    attention = AttentionOp("forward", 32, 16384, 16384, 128, torch.float32)

    def seconds(dtype: torch.dtype) -> float:
        return roofline.seconds(product(8192, 8192, 8192, dtype), Amount(1))

    plain = Roofline(hardware)
    key = product(8192, 8192, 8192, torch.float32)
    assert plain.seconds(key, Amount(1)) / seconds(torch.float32) == pytest.approx(times)
    assert seconds(torch.bfloat16) == plain.seconds(product(8192, 8192, 8192), Amount(1))
    amount = Amount(1, 0, 1e12)
    assert roofline.seconds(attention, amount) == plain.seconds(attention, amount)


def test_a_cpu_has_no_tf32() -> None:
    cpu = replace(HARDWARE, name="cpu", tf32_tflops=None)
    key = product(8192, 8192, 8192, torch.float32)
    plain, high = Roofline(cpu), Roofline(cpu, matmul_precision="high")
    assert plain.seconds(key, Amount(1)) == high.seconds(key, Amount(1))


def test_kernel_time_is_bytes_plus_launch() -> None:
    roofline, key = Roofline(HARDWARE), Kernel("forward", "aten::add")
    once = roofline.seconds(key, Amount(1, 9e11))
    many = roofline.seconds(key, Amount(1000, 9e11))
    assert once == pytest.approx(1.0, rel=1e-3)
    assert many > once


def test_fused_rounding_takes_two_kernels_of_five_bytes_for_each_number() -> None:
    roofline = Roofline(replace(HARDWARE, kernel_us=5.0))
    key = Rounding("forward", 4096, 1024, torch.bfloat16, kernels=9)
    numbers = 4096 * 1024
    fused = roofline.fused_seconds(key, Amount(3, 3 * 21 * numbers))
    assert fused == pytest.approx(3 * (5 * numbers / 0.9e12 + 2 * 5e-6))
    separate = roofline.seconds(key, Amount(3, 3 * 21 * numbers))
    assert separate == pytest.approx(3 * (21 * numbers / 0.9e12 + 9 * 5e-6))


def test_long_attention_is_faster_than_short() -> None:
    roofline = Roofline(HARDWARE)

    def seconds(length: int) -> float:
        key = AttentionOp("forward", 32, length, length, 128, torch.bfloat16)
        return roofline.seconds(key, Amount(1, 0, 1e12))

    assert seconds(16384) < seconds(1024)
    assert seconds(16384) > 1e12 / 5e13


def test_attention_over_512_keys_has_half_the_speed_of_long_sequences() -> None:
    roofline = Roofline(HARDWARE)

    def seconds(keys: int) -> float:
        key = AttentionOp("forward", 32, keys, keys, 128, torch.bfloat16)
        return roofline.seconds(key, Amount(1, 0, 1e12))

    assert seconds(512) == pytest.approx(2 * seconds(2**20), rel=0.01)


@pytest.mark.parametrize("name", ["bf16_tflops", "matrix_efficiency", "multiprocessors"])
def test_missing_roofline_figure_is_error(name: str) -> None:
    roofline = Roofline(replace(HARDWARE, **{name: None}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"hardware\.{name}=null: .*write hardware\.{name}="):
        roofline.seconds(product(8, 8, 8), Amount(1))


def test_kernel_bandwidth_uses_measurements_by_size() -> None:
    measured = replace(
        HARDWARE, kernel_bytes=[1e6, 1e8], kernel_latency_us=[10.0, 10_000.0], kernel_us=5.0
    )
    roofline, key = Roofline(measured), Kernel("forward", "aten::add")

    def us(num_bytes: float, count: int = 1) -> float:
        return roofline.seconds(key, Amount(count, num_bytes)) * 1e6

    assert us(5e5) == pytest.approx(5 + 5)
    assert us(1e6) == pytest.approx(5 + 10)
    assert us(1e8) == pytest.approx(5 + 10_000)
    assert us(2e8) == pytest.approx(5 + 20_000)
    # A hundred small ones fit in the cache that a large one exceeds.
    assert us(1e8, count=100) == pytest.approx(100 * (5 + 10))
