"""The precision of a run, from its configuration and its devices."""

from __future__ import annotations

import dataclasses

from axonlaunch.config.consistency.layout import estimate_device
from axonlaunch.config.precision import (
    MATMUL_FORMATS,
    NUMBER_FORMATS,
    PRECISIONS,
    MatmulFormat,
    Precision,
    QuantizedFormat,
    automatic_precision,
    master_format,
)
from axonlaunch.config.schema import RunConfig
from axonlaunch.config.values.plain_values import with_values


def with_precision(config: RunConfig, *, has_bf16: bool | None = None) -> RunConfig:
    """Decide ``train.precision=auto``.

    It is bf16 on GPUs that compute in bf16, and fp32 on others and on CPUs, which are slower in
    bf16 without special instructions. Weights in 16 bits require the precision of their format.

    Args:
        config: Configuration of a run.
        has_bf16: Whether the devices of the run compute in bf16; None decides by ``hardware`` and
            the device in the configuration, where an unknown device counts as a recent GPU.
    """
    if config.train.precision != "auto":
        return config
    if has_bf16 is None:
        hardware, device = config.hardware, config.launch.device
        on_gpu = estimate_device(config) == "gpu" if device == "auto" else device == "cuda"
        has_bf16 = on_gpu and (hardware is None or hardware.bf16_tflops is not None)
    stored = NUMBER_FORMATS[config.train.param_dtype]
    precision = automatic_precision(stored=stored, has_bf16=has_bf16)
    return with_values(config, {"train.precision": precision})


def precision_of(config: RunConfig) -> Precision:
    """Return the precision of a run, including its formats of tensors between computations."""
    precision, stored = PRECISIONS[config.train.precision], NUMBER_FORMATS[config.train.param_dtype]
    arithmetic = precision.replica_arithmetic
    return dataclasses.replace(
        precision,
        # Autocast keeps the sum over blocks in fp32 only if the embeddings are.
        replica_arithmetic="copies" if stored.is_low else arithmetic,
        parameters=stored,
        gradients=NUMBER_FORMATS.get(config.train.grad_dtype, stored),
        reduce=NUMBER_FORMATS[config.strategy.reduce_dtype],
        masters=master_format(config.optimizer),
        products=_products(config),
    )


def _products(config: RunConfig) -> MatmulFormat | None:
    chosen = MATMUL_FORMATS.get(config.train.matmul_dtype or "")
    if isinstance(chosen, QuantizedFormat):
        return dataclasses.replace(chosen, input_multiple=config.train.matmul_group_size)
    return chosen


def sums_as_stored(config: RunConfig) -> bool:
    """Return whether trained parameters, their gradients and sums over ranks have one format.

    torch's DDP supports no others. Adapters are in fp32, even on parameters in bf16.
    """
    precision = precision_of(config)
    stored = precision if config.adapter is None else PRECISIONS[config.train.precision]
    return precision.reduce == stored.parameters == stored.gradients
