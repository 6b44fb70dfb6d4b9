"""Defines the number formats and the precisions that a run can use.

A format is a value of ``train.param_dtype``, ``strategy.reduce_dtype`` or
``optimizer.state_dtype``. A precision is a value of ``train.precision``. To add one, add its row to
``NUMBER_FORMATS`` or ``PRECISIONS`` and its name to the type of the key. ``models.torch_dtypes``
converts formats to dtypes of torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

PrecisionName = Literal["fp32", "bf16", "fp16"]
"""Precisions that a run can compute in."""
PrecisionSetting = Literal["auto", "fp32", "bf16", "fp16"]
"""Values of ``train.precision``; ``auto`` is decided by the devices of the run."""
StoredFormatName = Literal["fp32", "bf16"]
"""Values of ``train.param_dtype`` and ``strategy.reduce_dtype``."""
ReplicaArithmetic = Literal["as stored", "copies", "autocast"]


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """A floating-point format.

    Attributes:
        name: Name in configurations, for example ``bf16``.
        dtype: Name of the torch dtype, for example ``bfloat16``.
        nbytes: Bytes per number.
        roundoff: Unit roundoff, the largest relative error of rounding to this format.
        tolerance: Largest relative difference of a gradient that ``axonlaunch verify`` attributes
            to rounding.
        peak: Field of ``HardwareConfig`` with the peak rate of matrix products in this format.
        relaxed_peak: Field with the peak rate if ``train.matmul_precision`` allows a lower
            precision inside products; None if it does not affect products in this format.
    """

    name: PrecisionName
    dtype: str
    nbytes: int
    roundoff: float
    tolerance: float
    peak: str
    relaxed_peak: str | None = None

    @property
    def is_low(self) -> bool:
        """Whether the format is smaller than fp32."""
        return self.nbytes < FP32.nbytes


FP32 = NumberFormat(
    name="fp32",
    dtype="float32",
    nbytes=4,
    roundoff=2.0**-24,
    tolerance=1e-5,
    peak="fp32_tflops",
    relaxed_peak="tf32_tflops",
)
_BF16 = NumberFormat(
    name="bf16",
    dtype="bfloat16",
    nbytes=2,
    roundoff=2.0**-8,
    tolerance=4 * 2.0**-8,
    peak="bf16_tflops",
)
_FP16 = NumberFormat(
    name="fp16",
    dtype="float16",
    nbytes=2,
    roundoff=2.0**-11,
    tolerance=8 * 2.0**-11,
    peak="fp16_tflops",
)
NUMBER_FORMATS: dict[str, NumberFormat] = {each.name: each for each in (FP32, _BF16, _FP16)}


def lowest_format(formats: Iterable[NumberFormat]) -> NumberFormat:
    """Return the format that rounds most; fp32 for an empty iterable."""
    return max(formats, key=lambda each: each.roundoff, default=FP32)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The formats of a training step.

    Attributes:
        name: Value of ``train.precision``.
        compute: Format of forward and backward.
        gather: Format in which sharded parameters are gathered.
        replica_arithmetic: Arithmetic of a model with full parameters. ``as stored`` uses the
            parameters themselves, ``copies`` uses copies in the ``compute`` format for the whole
            forward, and ``autocast`` uses ``torch.autocast``, which keeps the residual sum over
            blocks in fp32.
        needs_loss_scale: Whether small gradients underflow without a loss scale.
        reference: Format in which the reference of ``axonlaunch verify`` computes.
        parameters: Format in which parameters and their gradients are stored
            (``train.param_dtype``).
        reduce: Format in which gradients are summed over data-parallel ranks
            (``strategy.reduce_dtype``).
    """

    name: PrecisionName
    compute: NumberFormat
    gather: NumberFormat
    replica_arithmetic: ReplicaArithmetic
    needs_loss_scale: bool
    reference: NumberFormat
    parameters: NumberFormat = FP32
    reduce: NumberFormat = FP32

    @property
    def peak(self) -> str:
        """Field of ``HardwareConfig`` with the peak rate of the matrix products."""
        return self.compute.peak

    @property
    def relaxed_peak(self) -> str:
        """Field with the peak rate if ``train.matmul_precision`` allows lower precision."""
        return self.compute.relaxed_peak or self.compute.peak

    @property
    def lowest(self) -> NumberFormat:
        """The format that rounds most, among those of computation, parameters and reductions."""
        return lowest_format((self.compute, self.parameters, self.reduce))


_PRECISIONS = (
    Precision(
        name="fp32",
        compute=FP32,
        gather=FP32,
        replica_arithmetic="as stored",
        needs_loss_scale=False,
        reference=FP32,
    ),
    Precision(
        name="bf16",
        compute=_BF16,
        gather=_BF16,
        replica_arithmetic="copies",
        needs_loss_scale=False,
        reference=_BF16,
    ),
    # Under autocast, because the residual sum of many models exceeds 65,504.
    Precision(
        name="fp16",
        compute=_FP16,
        gather=_FP16,
        replica_arithmetic="autocast",
        needs_loss_scale=True,
        reference=_FP16,
    ),
)
PRECISIONS: dict[str, Precision] = {each.name: each for each in _PRECISIONS}


def automatic_precision(*, has_bf16: bool) -> PrecisionName:
    """Return what ``train.precision=auto`` becomes on devices with or without bf16."""
    return _BF16.name if has_bf16 else FP32.name


MIXED_PRECISION = PRECISIONS["bf16"]
"""Precision that ``mixed_precision=True`` selects in the Python interface."""


def state_format(optimizer: Any) -> NumberFormat | None:
    """Return the format of an optimizer's update and of its states with the parameter's shape.

    None means the format of each parameter. Registered optimizers may have no ``state_dtype``.
    """
    return FP32 if getattr(optimizer, "state_dtype", None) == FP32.name else None
