"""Initial weights that depend only on the seed and the parameter's name, not on the layout.

A parameter is drawn in blocks of rows, each with a separate generator. A rank that holds a shard
draws the blocks that overlap with it and gets the same bits as in the full parameter. Equal bits
are guaranteed only on CPUs with the same vector instructions, because torch's kernels guarantee no
more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from axonlaunch.comm.mesh import local_part
from axonlaunch.models.tensors.dtensor_regions import local_boxes
from axonlaunch.models.tensors.packed_blocks import empty_values, format_of
from axonlaunch.models.tensors.page_locked import page_locked

# Small enough that torch draws a block on one thread (its grain size is as large), and large enough
# that seeding a generator costs little in comparison.
_BLOCK_NUMEL = 2**15


class Initializer(Protocol):
    """Draws the initial values of a parameter.

    Attributes:
        blockwise: Whether blocks of rows can be drawn; else all rows are drawn, even if only a few
            are needed.
    """

    blockwise: ClassVar[bool] = True

    @property
    def key(self) -> str | None:
        """Name to draw under; None uses the parameter's name.

        It gives tied weights on different pipeline stages the same initial values.
        """
        return None

    @property
    def constant_rows(self) -> Sequence[Any]:
        """Later operations on some rows, see ``recorded_weights.Step``; the same for any seed."""
        return ()

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return fp32 values of the shape."""


@dataclass(frozen=True)
class Normal(Initializer):
    """A normal distribution."""

    std: float
    mean: float = 0.0
    key: str | None = None

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return fp32 values of the shape."""
        return _empty(shape).normal_(self.mean, self.std, generator=generator)


@dataclass(frozen=True)
class Uniform(Initializer):
    """A uniform distribution between ``-bound`` and ``bound``."""

    bound: float
    key: str | None = None

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return fp32 values of the shape."""
        return _empty(shape).uniform_(-self.bound, self.bound, generator=generator)


@dataclass(frozen=True)
class Constant(Initializer):
    """The same value for all elements."""

    value: float
    key: str | None = None

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """Return fp32 values of the shape."""
        return _empty(shape).fill_(self.value)


@torch.no_grad()
def initialize(module: nn.Module, *, seed: int, initializers: Mapping[str, Initializer]) -> None:
    """Fill every parameter, plain or DTensor, in place. Tied parameters are filled once.

    Args:
        module: A module with storage (see ``materialize``), sharded in any way.
        seed: Seed of the run.
        initializers: Initializers by full parameter name. Other names are ignored, so a mapping for
            the whole model can be used for a pipeline stage.

    Raises:
        ValueError: A parameter has no initializer, or no storage.
    """
    staging = Staging()
    for name, parameter in module.named_parameters():
        if name not in initializers:
            raise ValueError(f"parameter {name} has no initializer; give it one by that name")
        if parameter.is_meta:
            raise ValueError(f"parameter {name} is on the meta device; call materialize first")
        fill(parameter, initializers[name], seed=seed, name=name, staging=staging)


class Staging:
    """Page-locked host memory that a device reads directly; one buffer for many parameters.

    torch's allocator would lock up to twice as much memory and keep it until the process ends.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def like(self, part: Tensor) -> Tensor:
        """Return a contiguous tensor in the buffer with the shape and dtype of ``part``."""
        if part.nbytes > self._memory.nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)
            size = torch.empty(part.nbytes, dtype=torch.uint8, device="meta")
            self._memory = page_locked(size)
        return self._memory[: part.nbytes].view(part.dtype).view(part.shape)


@torch.no_grad()
def fill(
    parameter: Tensor,
    initializer: Initializer,
    *,
    seed: int,
    name: str,
    staging: Staging,
) -> None:
    """Fill this rank's part of one parameter in place.

    The values do not depend on the layout, only on the seed, the name and the position in the full
    parameter.

    Args:
        parameter: A full parameter, or a DTensor with a local part to fill.
        initializer: Initializer of the parameter.
        seed: Seed of the run.
        name: Name of the parameter in the whole model.
        staging: Buffer for values of parameters on a device; shared by all parameters of a model.
    """
    local = local_part(parameter)
    if local.numel() == 0:
        return
    if (stored := format_of(parameter)) is not None:
        values = empty_values(parameter)
        fill(values, initializer, seed=seed, name=name, staging=staging)
        local.copy_(stored.quantize(local_part(values)))
        return
    for box in local_boxes(parameter):
        part = box.view(local).view(1) if local.ndim == 0 else box.view(local)
        # For a device, draw in host memory that it reads directly, then copy once.
        drawn = staging.like(part) if part.is_cuda else part
        _fill(drawn, box.region or ((0, 1),), initializer, full=parameter, key=(seed, name))
        if drawn is not part:
            part.copy_(drawn)


def _fill(
    part: Tensor,
    region: Sequence[tuple[int, int]],
    initializer: Initializer,
    *,
    full: Tensor,
    key: tuple[int, str],
) -> None:
    """Fill a box of a full parameter by drawing the blocks of rows that overlap with it."""
    shape = tuple(full.shape) or (1,)
    (first, count), *columns = region
    is_blockwise = initializer.blockwise
    block_rows = max(1, _BLOCK_NUMEL // max(1, math.prod(shape[1:]))) if is_blockwise else shape[0]
    seed, name = key

    @torch.no_grad()
    def draw(block: int) -> None:
        generator = torch.Generator()
        start, stop = block * block_rows, min((block + 1) * block_rows, shape[0])
        generator.manual_seed(_block_seed(seed, initializer.key or name, block))
        shape_to_draw = (stop - start, *shape[1:]) if is_blockwise else tuple(full.shape)
        values = initializer.draw(shape_to_draw, generator).view(stop - start, *shape[1:])
        for step in initializer.constant_rows:
            row, last = (min(max(bound, start), stop) - start for bound in step.rows)
            step.apply(values[row:last], generator)
        low, high = max(start, first), min(stop, first + count)
        values = values[low - start : high - start]
        for dim, (offset, length) in enumerate(columns, start=1):
            values = values.narrow(dim, offset, length)
        part[low - first : high - first].copy_(values)

    blocks = range(first // block_rows, -(-(first + count) // block_rows))
    if len(blocks) > 1 < torch.get_num_threads():  # torch draws a block on one thread
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(draw, blocks))
    else:
        for block in blocks:
            draw(block)


def materialize(module: nn.Module, *, device: torch.device | str) -> None:
    """Allocate a meta-device module on a real device and fill its buffers.

    Parameters have no values until ``initialize`` or a checkpoint fills them. Buffers that have
    values keep them. Tied parameters stay tied, which ``to_empty`` does not ensure.
    """
    uses_by_parameter: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for key, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            uses_by_parameter.setdefault(id(parameter), []).append((owner, key))
    filled_buffers = [
        (owner, key, buffer)
        for owner in module.modules()
        for key, buffer in owner.named_buffers(recurse=False)
        if not buffer.is_meta
    ]
    module.to_empty(device=device)
    for owner, key, buffer in filled_buffers:
        setattr(owner, key, buffer.to(device, copy=True))
    for (first_owner, first_key), *others in uses_by_parameter.values():
        for owner, key in others:
            setattr(owner, key, first_owner._parameters[first_key])
    reset_buffers(module)


@runtime_checkable
class ComputesBuffers(Protocol):
    """A module with buffers that are computed from its configuration.

    ``to_empty`` leaves buffers without values, and checkpoints don't contain non-persistent ones.
    """

    def reset_buffers(self) -> None:
        """Compute the buffers on their device."""


def reset_buffers(module: nn.Module) -> None:
    """Compute the buffers of every submodule that is ``ComputesBuffers``."""
    for submodule in module.modules():
        if isinstance(submodule, ComputesBuffers):
            submodule.reset_buffers()


def transformer_initializers(module: nn.Module) -> dict[str, Initializer]:
    """Return the initializers of a transformer with a ``config`` and this package's module names.

    This is GPT-2's scheme (Radford et al., 2019): matrices are normal; matrices at the end of a
    residual branch are divided by the square root of the number of branches; norms are one and
    biases zero. If the standard deviation is not configured, it depends on the width (Nguyen and
    Salazar, Transformers without Tears, 2019) and equals GPT-2's 0.02 at GPT-2's width. A fixed
    0.02 would make narrow models learn slowly.
    """
    config: Any = module.config
    std = config.initializer_range or math.sqrt(0.4 / config.hidden_size)
    tied = getattr(config, "tie_word_embeddings", False)
    initializers: dict[str, Initializer] = {}
    for name, _ in module.named_parameters():
        owner, _, kind = name.rpartition(".")
        owner = owner.rpartition(".")[2]
        if kind == "bias":
            initializers[name] = Constant(0.0)
        elif owner.endswith("norm"):
            initializers[name] = Constant(1.0)
        elif "down_proj" in (owner, kind) or owner == "o_proj":
            initializers[name] = Normal(std / math.sqrt(2 * config.num_hidden_layers))
        elif owner == "lm_head" and tied:
            initializers[name] = Normal(std, key="embed_tokens.weight")
        else:
            initializers[name] = Normal(std)
    return initializers


def _empty(shape: Sequence[int]) -> Tensor:
    # Explicit, because a default dtype or an enclosing torch.device must not change the values.
    return torch.empty(tuple(shape), dtype=torch.float32, device="cpu")


def _block_seed(seed: int, name: str, block: int) -> int:
    # torch's CPU generator uses 32 bits of the seed. Among the millions of blocks of the largest
    # models a few pairs will get the same values, too few and too far apart to matter.
    return int.from_bytes(blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest())
