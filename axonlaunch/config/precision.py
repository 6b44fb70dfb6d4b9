"""Defines the number formats and the precisions that a run can use.

A format is a value of ``train.param_dtype``, ``train.grad_dtype``, ``strategy.reduce_dtype``,
``optimizer.master_weights`` or ``optimizer.state_dtype``. A precision is a value of
``train.precision``, and a format of products is a value of ``train.matmul_dtype``. To add one, add
its row to ``NUMBER_FORMATS``, ``PRECISIONS`` or ``MATMUL_FORMATS`` and its name to the type of the
key. ``models.torch_dtypes`` converts number formats to dtypes of torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

PrecisionName = Literal["fp32", "bf16", "fp16"]
"""Precisions that a run can compute in, and values of ``train.param_dtype``."""
PrecisionSetting = Literal["auto", "fp32", "bf16", "fp16"]
"""Values of ``train.precision``; ``auto`` is decided by the devices of the run."""
ReducedFormatName = Literal["fp32", "bf16"]
"""Values of ``strategy.reduce_dtype``."""
GradientFormatName = Literal["parameter", "fp32"]
"""Values of ``train.grad_dtype``."""
StateFormatName = Literal["parameter", "fp32", "bf16", "8bit"]
"""Values of ``optimizer.state_dtype``."""
SIXTEEN_BITS = "bf16"
"""Value of ``optimizer.state_dtype`` that rounds states to bf16, up or down at random."""
EIGHT_BITS = "8bit"
"""Value of ``optimizer.state_dtype`` that stores states in blocks of 8-bit codes."""
BLOCK = 64
"""Number of values of a quantized tensor that share a scale."""
SCALE_BYTES = 4
"""Bytes of the scale of a block."""
MasterFormatName = Literal["fp32"]
"""Values of ``optimizer.master_weights``."""
MatmulFormatName = Literal["fp8_tensorwise", "fp8_rowwise", "qat_int8_int4"]
"""Values of ``train.matmul_dtype``."""
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


@dataclass(frozen=True, kw_only=True)
class MatmulFormat:
    """How the factors of matrix products are rounded; results have a ``NumberFormat``.

    Attributes:
        name: Name in configurations.
        input_multiple: Number that the inputs of layers must be multiples of.
        output_multiple: Number that the outputs of layers must be multiples of.
        peak: Field of ``HardwareConfig`` with the peak rate of the products; None if they are
            computed in the format of the results.
    """

    name: MatmulFormatName
    input_multiple: int = 1
    output_multiple: int = 1
    peak: str | None = None


@dataclass(frozen=True, kw_only=True)
class Float8Format(MatmulFormat):
    """Products of numbers in 8 bits.

    Attributes:
        is_rowwise: Whether each row along the summed dim has a scale; otherwise each tensor has.
        dtype: Name of the torch dtype of weights and activations.
        gradient_dtype: Name of the torch dtype of gradients of outputs.
    """

    is_rowwise: bool
    dtype: str = "float8_e4m3fn"
    gradient_dtype: str
    input_multiple: int = 16
    output_multiple: int = 16
    peak: str = "fp8_tflops"


@dataclass(frozen=True, kw_only=True)
class QuantizedFormat(MatmulFormat):
    """Products of numbers that are rounded as quantization will round them after training.

    Inputs have a scale and a zero point for each row along the summed dim. Weights have a scale for
    each group of ``input_multiple`` numbers along it (``train.matmul_group_size``).

    Attributes:
        input_bits: Bits of an input.
        weight_bits: Bits of a weight.
    """

    input_bits: int
    weight_bits: int


# torchao's recipes of these names, and its Int8DynActInt4WeightQATQuantizer.
_MATMUL_FORMATS: tuple[MatmulFormat, ...] = (
    Float8Format(name="fp8_tensorwise", is_rowwise=False, gradient_dtype="float8_e5m2"),
    Float8Format(name="fp8_rowwise", is_rowwise=True, gradient_dtype="float8_e4m3fn"),
    QuantizedFormat(name="qat_int8_int4", input_bits=8, weight_bits=4),
)
MATMUL_FORMATS: dict[str, MatmulFormat] = {each.name: each for each in _MATMUL_FORMATS}


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
        parameters: Format in which parameters are stored (``train.param_dtype``).
        gradients: Format in which the gradients of micro-batches are added up
            (``train.grad_dtype``).
        reduce: Format in which gradients are summed over data-parallel ranks
            (``strategy.reduce_dtype``).
        masters: Format of the copies of parameters that the optimizer updates, and that checkpoints
            hold in place of the parameters (``optimizer.master_weights``); None without copies.
        products: Format that factors of linear layers' products are rounded to
            (``train.matmul_dtype``); None if they are not rounded.
    """

    name: PrecisionName
    compute: NumberFormat
    gather: NumberFormat
    replica_arithmetic: ReplicaArithmetic
    needs_loss_scale: bool
    reference: NumberFormat
    parameters: NumberFormat = FP32
    gradients: NumberFormat = FP32
    reduce: NumberFormat = FP32
    masters: NumberFormat | None = None
    products: MatmulFormat | None = None

    @property
    def peak(self) -> str:
        """Field of ``HardwareConfig`` with the peak rate of the matrix products."""
        return self.compute.peak

    @property
    def relaxed_peak(self) -> str:
        """Field with the peak rate if ``train.matmul_precision`` allows lower precision."""
        return self.compute.relaxed_peak or self.compute.peak

    @property
    def saved(self) -> NumberFormat:
        """Format of trained parameters in checkpoints."""
        return self.masters or self.parameters

    @property
    def lowest(self) -> NumberFormat:
        """The format that rounds most, among those of computation, parameters and reductions."""
        return lowest_format((self.compute, self.parameters, self.gradients, self.reduce))


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


def automatic_precision(*, has_bf16: bool, stored: NumberFormat = FP32) -> PrecisionName:
    """Return what ``train.precision=auto`` becomes.

    Args:
        has_bf16: Whether the devices compute in bf16.
        stored: Format of the parameters.
    """
    if stored.is_low:
        return stored.name
    return _BF16.name if has_bf16 else FP32.name


MIXED_PRECISION = PRECISIONS["bf16"]
"""Precision that ``mixed_precision=True`` selects in the Python interface."""


def master_format(optimizer: Any) -> NumberFormat | None:
    """Return the format of the masters that an optimizer updates; None if it updates parameters."""
    return NUMBER_FORMATS.get(getattr(optimizer, "master_weights", None) or "")


def state_format(optimizer: Any) -> NumberFormat | None:
    """Return the format of an optimizer's states with the shape of the parameter.

    None means the format of each parameter. With ``state_dtype=8bit`` it is fp32, the format of
    states that are too small to be quantized. Registered optimizers may have no ``state_dtype``.
    """
    if quantizes_states(optimizer):
        return FP32
    chosen = NUMBER_FORMATS.get(getattr(optimizer, "state_dtype", ""))
    return chosen or master_format(optimizer)


def quantizes_states(optimizer: Any) -> bool:
    """Return whether an optimizer's states are stored in 8 bits."""
    return getattr(optimizer, "state_dtype", None) == EIGHT_BITS


def rounds_states(optimizer: Any) -> bool:
    """Return whether an optimizer's states are rounded after each update, to 16 or to 8 bits."""
    stored = state_format(optimizer)
    return quantizes_states(optimizer) or (stored is not None and stored.is_low)


def update_format(optimizer: Any) -> NumberFormat | None:
    """Return the format in which an optimizer updates; None for the format of each parameter."""
    return None if state_format(optimizer) is None else FP32
