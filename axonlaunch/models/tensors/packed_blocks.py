"""Quantized tensors: blocks of 64 values along the last dim, each followed by its scale.

A tensor of shape [..., n] is stored as uint8 of shape [..., n / 64, bytes], where the bytes of a
block are its codes and then its scale in fp32. Every cut between blocks is therefore a cut of one
tensor, and a part of a quantized tensor equals the quantized part, to the bit. A tensor subclass is
not needed, and no mixed precision casts the scales.

Source: Dettmers et al., "QLoRA", 2023, section 3; bitsandbytes, ``functional.py``.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from axonlaunch.comm.mesh import local_part
from axonlaunch.config.precision import BLOCK as BLOCK, EIGHT_BITS, SCALE_BYTES
from axonlaunch.config.registry import Needs
from axonlaunch.models.tensors.dtensor_regions import dtensor_of
from axonlaunch.models.torch_internals import local_tensor, without_modes

# From this version on, it dequantizes on CPUs as on GPUs.
_BITSANDBYTES = Needs("bitsandbytes", "bitsandbytes", "axonlaunch[quantized]", oldest=(0, 48))
_LARGEST_CODE = 127
"""Largest magnitude of a code of int8."""


class BlockFormat(ABC):
    """Storage format of a block of quantized values.

    Attributes:
        name: Value of ``adapter.base``.
        code_bytes: Bytes of the codes of a block.
    """

    name: ClassVar[str]
    code_bytes: ClassVar[int]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block with its scale."""
        return self.code_bytes + SCALE_BYTES

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the uint8 tensor that stores values of a shape [..., n].

        Args:
            shape: Shape with a last size that is a multiple of ``BLOCK``.
        """
        return *shape[:-1], shape[-1] // BLOCK, self.block_bytes

    @torch.no_grad()
    def quantize(self, values: Tensor) -> Tensor:
        """Return the uint8 tensor that stores floating-point values [..., n]."""
        *shape, block_bytes = self.packed_shape(values.shape)
        if values.is_meta or not values.numel():  # kernels of CUDA can't start without a block
            return torch.empty(*shape, block_bytes, dtype=torch.uint8, device=values.device)
        codes, scales = self._quantize(values.contiguous())
        codes = codes.view(*shape, self.code_bytes)
        return torch.cat([codes, scales.view(*shape, 1).view(torch.uint8)], -1)

    @torch.no_grad()
    def dequantize(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values [..., n] of a quantized tensor or of this rank's part of one."""
        packed = local_tensor(packed).detach()
        assert packed.shape[-1] == self.block_bytes, "the tensor has another format"
        shape = (*packed.shape[:-2], packed.shape[-2] * BLOCK)
        if not packed.numel():
            return torch.empty(shape, dtype=dtype, device=packed.device)
        codes = packed[..., : self.code_bytes].contiguous()
        scales = packed[..., self.code_bytes :].contiguous().view(torch.float32)
        return self._dequantize(codes.flatten(), scales.flatten(), shape, dtype)

    @abstractmethod
    def _quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales of contiguous values."""

    @abstractmethod
    def _dequantize(
        self, codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Return values from 1-D codes and scales."""


class _NF4(BlockFormat):
    """4-bit NormalFloat of bitsandbytes: two codes per byte; the scale is the largest magnitude."""

    name = "nf4"
    code_bytes = BLOCK // 2

    def _quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        codes, state = _library().quantize_4bit(values, blocksize=BLOCK, quant_type=self.name)
        return codes, state.absmax

    def _dequantize(
        self, codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        options = {"shape": torch.Size(shape), "dtype": dtype, "quant_type": self.name}
        state = _library().QuantState(absmax=scales, blocksize=BLOCK, **options)
        values: Tensor = _library().dequantize_4bit(codes.view(-1, 1), state)
        return values


class _Int8(BlockFormat):
    """Whole numbers from -127 to 127, times the scale."""

    name = "int8"
    code_bytes = BLOCK

    def _quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        blocks = values.float().view(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True) / _LARGEST_CODE
        codes = (blocks / scales).round_().nan_to_num_(0.0)  # a block of zeros has the scale 0
        return codes.to(torch.int8).view(torch.uint8), scales

    def _dequantize(
        self, codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        values = torch.empty(len(scales), BLOCK, dtype=dtype, device=codes.device)
        # Computes in fp32 and rounds once.
        torch.mul(codes.view(torch.int8).view(-1, BLOCK), scales.unsqueeze(1), out=values)
        return values.view(shape)


class _Dynamic(BlockFormat):
    """8-bit codes of bitsandbytes' optimizers; more of them are near zero than near the scale.

    A tensor of zero bytes has the value 0.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022.
    """

    name = EIGHT_BITS
    code_bytes = BLOCK

    def __init__(self, *, is_signed: bool) -> None:
        self._is_signed = is_signed

    def _quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        code = _dynamic_codes(self._is_signed, values.device)
        with _in_default_stream(values.device):
            codes, state = _library().quantize_blockwise(values.float(), code=code, blocksize=BLOCK)
        return codes, state.absmax

    def _dequantize(
        self, codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        code = _dynamic_codes(self._is_signed, codes.device)
        options = {"absmax": scales, "code": code, "blocksize": BLOCK}
        values: Tensor = _library().dequantize_blockwise(codes.view(-1, BLOCK), **options)
        return values.to(dtype).view(shape)


@contextmanager
def _in_default_stream(device: torch.device) -> Iterator[None]:
    """Order a kernel in CUDA's default stream after and before the work of the current stream.

    bitsandbytes passes no stream to its 8-bit quantization, and states that are offloaded are
    quantized in a stream of their own.
    """
    if device.type != "cuda":
        yield
        return
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    default.wait_stream(current)
    yield
    current.wait_stream(default)


@functools.cache
def _dynamic_codes(is_signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values of the codes, in ascending order; an estimate does not count them."""
    with without_modes():
        codes: Tensor = _library().create_dynamic_map(signed=is_signed).to(device)
    return codes


STATE_FORMATS: dict[bool, BlockFormat] = {
    is_positive: _Dynamic(is_signed=not is_positive) for is_positive in (False, True)
}
"""Formats of optimizer states in 8 bits, by whether no element is negative."""
BLOCK_FORMATS: dict[str, BlockFormat] = {each.name: each for each in (_NF4(), _Int8())}
_BY_BYTES = {each.block_bytes: each for each in BLOCK_FORMATS.values()}


def format_of(tensor: Tensor) -> BlockFormat | None:
    """Return the format of a quantized tensor, plain or sharded; None for all others."""
    if tensor.dtype is not torch.uint8 or tensor.ndim < 3:
        return None
    return _BY_BYTES.get(tensor.shape[-1])


def logical_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the values that a tensor stores, quantized or not."""
    if format_of(tensor) is None:
        return tuple(tensor.shape)
    return *tensor.shape[:-2], tensor.shape[-2] * BLOCK


def logical_numel(tensor: Tensor) -> int:
    """Return the number of values that a tensor stores, quantized or not."""
    return torch.Size(logical_shape(tensor)).numel()


def empty_values(packed: Tensor) -> Tensor:
    """Return fp32 memory for the values of a quantized tensor, sharded in the same way."""
    local = local_part(packed)
    return _sharded_like(packed, torch.empty(logical_shape(local), device=local.device))


def state_values(packed: Tensor, *, is_positive: bool) -> Tensor:
    """Return the fp32 values of an optimizer state in 8 bits, sharded in the same way."""
    return _sharded_like(packed, STATE_FORMATS[is_positive].dequantize(packed, torch.float32))


def _sharded_like(packed: Tensor, values: Tensor) -> Tensor:
    if not isinstance(packed, DTensor):
        return values
    shape = logical_shape(packed)
    stride = torch.empty(shape, device="meta").stride()
    return dtensor_of(values, packed.device_mesh, packed.placements, shape=shape, stride=stride)


def library_problem() -> str:
    """Return why bitsandbytes, for nf4 and states in 8 bits, can't be used; empty if it can."""
    return _BITSANDBYTES.problem()


def _library() -> Any:
    # Its import takes a second, and only runs with a quantized base need it.
    import bitsandbytes.functional

    return bitsandbytes.functional
