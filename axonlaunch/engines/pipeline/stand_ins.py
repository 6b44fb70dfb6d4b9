"""A pipeline stage that runs the whole model's own forward, with stand-ins for what it lacks.

Masks, positions and whatever else the forward computes around its blocks come from the authors'
code on every stage. ``models.block_flow`` says for which models that is the same.

Take the second of three stages, blocks 2 and 3 of 6. Its forward is fed tokens of the right shape:
embeddings are stand-ins that return zeros of no bytes, which block 0 passes on and block 1, the
last before the stage's own, replaces by what was received. Blocks 2 and 3 compute. Block 4 ends the
forward and carries their hidden states out, so that norm and head are never reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.models.block_flow import BATCH, LENGTH, TOKENS
from axonlaunch.models.spec import BlockFlow, Dim
from axonlaunch.models.torch_internals import is_view


class _Leaving(BaseException):
    """Ends a stage's forward with its hidden states; no code of a model takes it for an error."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _MicroBatch:
    """What a stage's stand-ins return while it computes."""

    received: Tensor | None = None


class StandIn(nn.Module):
    """In place of a module that another stage keeps; has its attributes and no parameters."""

    is_stand_in = True
    """``ModelSpec.blocks`` passes over it."""

    def __init__(self, absent: nn.Module) -> None:
        super().__init__()
        self._absent = (absent.to("meta"),)  # in a tuple, which hides it from this one's parameters

    def __getattr__(self, name: str) -> Any:
        """Return what the absent module has: models look at what kind of block comes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            (absent,) = self.__dict__.get("_absent", (None,))
            return getattr(absent, name)


class PassingBlock(StandIn):
    """A block that returns what it is given, or what the stage received."""

    def __init__(
        self, absent: nn.Module, *, returns: int | None, received_by: _MicroBatch | None = None
    ) -> None:
        super().__init__(absent)
        self._returns = returns
        self._micro_batch = received_by

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor | None, ...]:
        """Return hidden states as the absent block returns them."""
        if self._micro_batch is not None:
            assert self._micro_batch.received is not None, "a stage is fed by the one before it"
            hidden = self._micro_batch.received
        if self._returns is None:
            return hidden
        return (hidden, *[None] * (self._returns - 1))


class LeavingBlock(StandIn):
    """The first block of the next stage, at which this stage's forward ends."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> None:
        """Carry the hidden states out."""
        raise _Leaving(hidden)


class End(StandIn):
    """A module before the blocks: zeros of the shape that it would return.

    They have no bytes, unless the model writes to them.
    """

    def __init__(
        self,
        absent: nn.Module,
        *,
        shape: Sequence[Dim],
        is_written: bool,
        micro_batch: _MicroBatch,
    ) -> None:
        super().__init__(absent)
        self._shape = tuple(shape)
        self._is_written = is_written
        self._micro_batch = micro_batch

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return zeros of the type of what was received, as rotary tables and masks follow it."""
        received = self._micro_batch.received
        assert received is not None, "a stage is fed by the one before it"
        batch, length = received.shape[:2]
        sizes: dict[Dim, int] = {BATCH: batch, LENGTH: length, TOKENS: batch * length}
        shape = [sizes.get(dim, dim) for dim in self._shape]
        zeros: Tensor = received.new_zeros(()).expand(shape)  # type: ignore[arg-type]
        return zeros.clone(memory_format=torch.contiguous_format) if self._is_written else zeros


def cut_out(
    model: nn.Module, flow: BlockFlow, *, blocks: Sequence[str], first: int, last: int
) -> nn.Module:
    """Make a stage of a whole model without storage, in place; return it.

    Its forward takes tokens, or hidden states [samples, tokens, ...] of the stage before it, and
    returns hidden states, or on the last stage what the model returns.

    Args:
        model: The whole.
        flow: What passes through its blocks.
        blocks: Full names of all of them.
        first: The stage's first block.
        last: One past its last.
    """
    micro_batch = _MicroBatch()
    for number, name in enumerate(blocks):
        if number == last:
            _replace(model, name, LeavingBlock(model.get_submodule(name)))
        elif not first <= number < last:
            _replace(
                model,
                name,
                PassingBlock(
                    model.get_submodule(name),
                    returns=flow.returns[number],
                    received_by=micro_batch if number == first - 1 else None,
                ),
            )
    absent = [*(flow.before if first else ()), *(flow.after if last < len(blocks) else ())]
    for name in absent:
        shape = flow.shapes.get(name, ())
        end = End(
            model.get_submodule(name),
            shape=shape,
            is_written=name in flow.written,
            micro_batch=micro_batch,
        )
        _replace(model, name, end)
    whole: Any = model.forward

    def forward(received: Tensor, **beside: Tensor) -> Any:
        tokens = received
        if first:
            micro_batch.received = received
            # Their shape is all that the preamble asks for.
            tokens = torch.zeros(received.shape[:2], dtype=torch.int64, device=received.device)
        try:
            return whole(tokens, **beside)
        except _Leaving as leaving:
            hidden = leaving.hidden
            # torch's stages detach what they pass on in place, which a view does not allow.
            return hidden.clone() if is_view(hidden) else hidden
        finally:
            micro_batch.received = None

    model.forward = forward
    return model


@contextmanager
def without(model: nn.Module, flow: BlockFlow, *, blocks: Sequence[str]) -> Iterator[None]:
    """Let a whole model pass over some of its blocks for a while."""
    absent = {name: model.get_submodule(name) for name in blocks}
    for name in absent:
        returns = flow.returns[int(name.rpartition(".")[2])]
        _replace(model, name, PassingBlock(nn.Identity(), returns=returns))
    try:
        yield
    finally:
        for name, block in absent.items():
            _replace(model, name, block)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, own = name.rpartition(".")
    model.get_submodule(owner)._modules[own] = module
