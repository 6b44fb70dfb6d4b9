"""Initial weights that depend on the seed and the parameter's name alone, never on the layout.

A parameter is drawn in blocks of rows, each from its own generator, so a rank that holds a shard
draws the blocks that touch it and gets the bits that the whole would have there. Equal bits are
promised on CPUs with the same vector instructions; torch's kernels promise no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from axonlaunch.models.dtensor_regions import local_boxes
from axonlaunch.models.page_locked import page_locked

# Small enough that torch draws a block on one thread (its grain is as large), large enough that
# seeding a generator costs little beside it.
_BLOCK_NUMEL = 2**15


class Initializer(Protocol):
    """How a parameter starts.

    One with an attribute ``blockwise`` that is False draws all rows at once, however few are held;
    one with ``constant_rows`` has rows that are the same for every seed.

    Attributes:
        key: The name to draw under instead of the parameter's own. The two ends of tied weights
            on different pipeline stages start alike through it.
    """

    @property
    def key(self) -> str | None:
        """Name to draw under; None: the parameter's own."""

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return fp32 values of the shape."""


@dataclass(frozen=True)
class Normal:
    """A normal distribution."""

    std: float
    mean: float = 0.0
    key: str | None = None

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return fp32 values of the shape."""
        return _empty(shape).normal_(self.mean, self.std, generator=generator)


@dataclass(frozen=True)
class TruncatedNormal:
    """A normal distribution without what lies further than ``cutoff`` deviations out."""

    std: float
    mean: float = 0.0
    cutoff: float = 3.0
    key: str | None = None

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return fp32 values of the shape."""
        reach = self.cutoff * self.std
        return nn.init.trunc_normal_(
            _empty(shape),
            self.mean,
            self.std,
            a=self.mean - reach,
            b=self.mean + reach,
            generator=generator,
        )


@dataclass(frozen=True)
class Uniform:
    """Evenly between minus and plus ``bound``."""

    bound: float
    key: str | None = None

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return fp32 values of the shape."""
        return _empty(shape).uniform_(-self.bound, self.bound, generator=generator)


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float
    key: str | None = None

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """Return fp32 values of the shape."""
        return _empty(shape).fill_(self.value)


@torch.no_grad()
def initialize(module: nn.Module, *, seed: int, initializers: Mapping[str, Initializer]) -> None:
    """Fill every parameter, plain or DTensor, in place; tied ones once.

    Args:
        module: A module with storage (see ``materialize``), sharded in any way.
        seed: The run's seed.
        initializers: How each parameter starts, by its full name. Names that the module lacks
            are passed over, so a mapping for the whole model serves a pipeline stage.

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
    """Host memory that a device reads directly: one buffer, from parameter to parameter.

    torch's own allocator would lock up to twice as much, and keep it as long as the process lives.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def like(self, part: Tensor) -> Tensor:
        """Return a contiguous tensor of a part's shape and type, in the buffer."""
        if part.nbytes > self._memory.nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)
            asked = torch.empty(part.nbytes, dtype=torch.uint8, device="meta")
            self._memory = page_locked(asked)
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
    """Fill what this rank holds of one parameter, in place.

    The values are those that any layout would give it: they follow from the seed, the name and the
    place in the whole parameter alone.

    Args:
        parameter: Whole, or a DTensor, whose local part is filled.
        initializer: How it starts.
        seed: The run's.
        name: Of the parameter in the whole model.
        staging: Where a device's are drawn; the same for all that are filled together.
    """
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.numel() == 0:
        return
    for box in local_boxes(parameter):
        part = box.of(local).view(1) if local.ndim == 0 else box.of(local)
        # Of a device one copy is made, from memory that it reads directly.
        drawn = staging.like(part) if part.is_cuda else part
        _fill(drawn, box.region or ((0, 1),), initializer, whole=parameter, key=(seed, name))
        if drawn is not part:
            part.copy_(drawn)


def _fill(
    part: Tensor,
    region: Sequence[tuple[int, int]],
    initializer: Initializer,
    *,
    whole: Tensor,
    key: tuple[int, str],
) -> None:
    """Fill a box of a whole parameter, drawing the blocks of rows that touch it."""
    shape = tuple(whole.shape) or (1,)
    (first, count), *columns = region
    is_blockwise = getattr(initializer, "blockwise", True)
    block_rows = max(1, _BLOCK_NUMEL // max(1, math.prod(shape[1:]))) if is_blockwise else shape[0]
    seed, name = key

    @torch.no_grad()
    def draw(block: int) -> None:
        generator = torch.Generator()
        start, stop = block * block_rows, min((block + 1) * block_rows, shape[0])
        generator.manual_seed(_block_seed(seed, initializer.key or name, block))
        drawn = (stop - start, *shape[1:]) if is_blockwise else tuple(whole.shape)
        values = initializer.draw(drawn, generator).view(stop - start, *shape[1:])
        for step in getattr(initializer, "constant_rows", ()):
            row, last = (min(max(at, start), stop) - start for at in step.rows)
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
    """Give a module built on the meta device storage on a real one, and fill its buffers.

    Parameters are left without values: ``initialize`` or a checkpoint fills them. Buffers that have
    values keep them. Tied parameters stay tied, which ``to_empty`` alone does not see to.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for key, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((owner, key))
    valued = [
        (owner, key, buffer)
        for owner in module.modules()
        for key, buffer in owner.named_buffers(recurse=False)
        if not buffer.is_meta
    ]
    module.to_empty(device=device)
    for owner, key, buffer in valued:
        setattr(owner, key, buffer.to(device, copy=True))
    for (first_owner, first_key), *others in places.values():
        for owner, key in others:
            setattr(owner, key, getattr(first_owner, first_key))
    reset_buffers(module)


def reset_buffers(module: nn.Module) -> None:
    """Call ``reset_buffers()`` of every submodule that has one.

    A module whose buffers follow from its configuration implements it; ``to_empty`` leaves
    buffers without values, and those that are not persistent are in no checkpoint.
    """
    for submodule in module.modules():
        reset = getattr(submodule, "reset_buffers", None)
        if callable(reset):
            reset()


def transformer_initializers(module: nn.Module) -> dict[str, Initializer]:
    """Return how a transformer starts that has a ``config`` and is named as the ones here are.

    GPT-2's scheme (Radford et al., 2019): matrices are normal; those that end a residual branch
    are divided by the root of the number of branches; norms start at one, biases at zero. Unless
    it is given, the deviation follows the width (Nguyen and Salazar, Transformers without Tears,
    2019), which is GPT-2's 0.02 at its width; 0.02 everywhere makes narrow models learn slowly.
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
        elif owner in ("o_proj", "down_proj"):
            initializers[name] = Normal(std / math.sqrt(2 * config.num_hidden_layers))
        elif owner == "lm_head" and tied:
            initializers[name] = Normal(std, key="embed_tokens.weight")
        else:
            initializers[name] = Normal(std)
    return initializers


def _empty(shape: Sequence[int]) -> Tensor:
    # Spelled out: neither a default dtype nor an enclosing torch.device may change the draws.
    return torch.empty(tuple(shape), dtype=torch.float32, device="cpu")


def _block_seed(seed: int, name: str, block: int) -> int:
    # torch's CPU generator uses 32 bits of it. Among the millions of blocks of the largest models
    # some pairs will start alike, too few and too far apart to matter.
    return int.from_bytes(blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest())
