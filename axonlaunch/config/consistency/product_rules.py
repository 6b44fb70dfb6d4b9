"""Rules of ``train.matmul_dtype`` and the settings that belong to it."""

from __future__ import annotations

from collections.abc import Iterator

from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.config.precision import QuantizedFormat
from axonlaunch.config.problems.errors import ConfigIssue
from axonlaunch.config.schema import RunConfig, TrainConfig


def rounding_problems(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield rounded products that a base or the hardware rules out, and unused settings of them."""
    train, hardware, products = config.train, config.hardware, precision_of(config).products
    for key in ("matmul_group_size", "matmul_start_step"):
        value, default = getattr(train, key), getattr(TrainConfig, key)
        if value != default and not isinstance(products, QuantizedFormat):
            message = "is for train.matmul_dtype=qat_int8_int4; set it, or remove this setting"
            yield ConfigIssue(f"train.{key}", message, value)
    if train.steps != "auto" and 0 < train.num_steps <= train.matmul_start_step:
        message = (
            f"no step rounds, because the last one is {train.num_steps - 1}; use an earlier one"
        )
        yield ConfigIssue("train.matmul_start_step", message, train.matmul_start_step)
    if products is None:
        if train.matmul_exclude:
            message = "train.matmul_dtype is null; set it, or remove this setting"
            yield ConfigIssue("train.matmul_exclude", message, train.matmul_exclude)
        return
    if config.adapter is not None and config.adapter.base is not None:
        message = (
            f"weights in {config.adapter.base} would be rounded a second time; use null, or "
            "adapter.base=null"
        )
        yield ConfigIssue("train.matmul_dtype", message, products.name)
    adapter = config.adapter
    if adapter and adapter.dora and adapter.dropout and isinstance(products, QuantizedFormat):
        message = (
            "DoRA multiplies dropped inputs with weights that are not rounded, unlike evaluation; "
            "use 0, or train.matmul_dtype=null"
        )
        yield ConfigIssue("adapter.dropout", message, adapter.dropout)
    if config.strategy.tensor.async_collectives:
        message = (
            "torch overlaps no products of rounded numbers; use false, or train.matmul_dtype=null"
        )
        yield ConfigIssue("strategy.tensor.async_collectives", message, True)
    if hardware is None or hardware.is_cpu or products.peak is None:
        return
    if getattr(hardware, products.peak) is None:
        message = (
            f"hardware={hardware.name} has no {products.peak}, a peak of products in this dtype; "
            f"use null, other hardware, or hardware.{products.peak}=NUMBER if it has them"
        )
        yield ConfigIssue("train.matmul_dtype", message, products.name)
