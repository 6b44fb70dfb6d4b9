"""A pipeline stage that runs the full model's forward, with placeholders for absent modules.

The model's code computes masks, positions and everything else around the blocks on every stage.
``models.fake.block_flow`` determines for which models this gives the same result.

Example: the second of three stages holds blocks 2 and 3 of 6. Its forward gets tokens of the right
shape. The embeddings are placeholders that return zeros without storage. Block 0 passes them on,
and block 1, the last before the stage, replaces them by the received hidden states. Blocks 2 and 3
compute. Block 4 ends the forward and returns their hidden states, so norm and head are not reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.models.fake.block_flow import BATCH, LENGTH, TOKENS
from axonlaunch.models.modules.placeholder import Placeholder
from axonlaunch.models.specs.model_spec import BlockFlow, Dim
from axonlaunch.models.specs.router_loss import RouterLossModel
from axonlaunch.models.torch_internals import is_view


class _Leaving(BaseException):
    """Ends a stage's forward early and carries its hidden states.

    Not a subclass of ``Exception``, so that model code does not catch it.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _MicroBatch:
    """The hidden states that a stage received, shared by its placeholders during a forward."""

    received: Tensor | None = None


class PassingBlock(Placeholder):
    """Placeholder for a block of another stage: returns its input.

    The last block before the stage returns the hidden states that the stage received instead.
    """

    def __init__(
        self, absent: nn.Module, *, returns: int | None, micro_batch: _MicroBatch | None = None
    ) -> None:
        """Create the placeholder.

        Args:
            returns: Length of the tuple that the block returns; None if it returns a tensor.
            micro_batch: Holder of the received hidden states, for the last block before the stage.
        """
        super().__init__(absent)
        self._returns = returns
        self._micro_batch = micro_batch

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor | None, ...]:
        """Return hidden states in the format of the absent block."""
        if self._micro_batch is not None:
            assert self._micro_batch.received is not None, "no input from the previous stage"
            hidden = self._micro_batch.received
        if self._returns is None:
            return hidden
        return (hidden, *[None] * (self._returns - 1))


class LeavingBlock(Placeholder):
    """Placeholder for the next stage's first block, which ends this stage's forward.

    Models can replace the hidden states that the stage returns, see ``RouterLossModel.leave``.
    """

    def __init__(self, absent: nn.Module, *, model: nn.Module) -> None:
        super().__init__(absent)
        self._leave = model.leave if isinstance(model, RouterLossModel) else None

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> None:
        """End the stage's forward by an exception that carries its hidden states."""
        raise _Leaving(hidden if self._leave is None else self._leave(hidden))


class End(Placeholder):
    """Placeholder for a module before or after the blocks; returns zeros of the original shape.

    The zeros use no storage, unless the model writes to them.
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
        """Return zeros with the dtype and device of the received hidden states.

        The model's code derives the dtype of rotary tables and masks from them.
        """
        received = self._micro_batch.received
        assert received is not None, "no input from the previous stage"
        batch, length = received.shape[:2]
        sizes: dict[Dim, int] = {BATCH: batch, LENGTH: length, TOKENS: batch * length}
        shape = [sizes.get(dim, dim) for dim in self._shape]
        zeros: Tensor = received.new_zeros(()).expand(shape)  # type: ignore[arg-type]
        return zeros.clone(memory_format=torch.contiguous_format) if self._is_written else zeros


def keep_blocks(
    model: nn.Module,
    flow: BlockFlow,
    *,
    blocks: Sequence[str],
    first: int,
    last: int,
    sequence_parts: int = 1,
) -> nn.Module:
    """Turn a full model into a stage, in place, and return it.

    Its forward takes tokens, or hidden states [samples, tokens, ...] of the previous stage. It
    returns hidden states, or the model's outputs on the last stage.

    Args:
        model: The full model; absent modules are moved to ``meta``.
        flow: Description of the tensors that pass through its blocks.
        blocks: Full names of all blocks.
        first: Index of the stage's first block.
        last: Index after the stage's last block.
        sequence_parts: Number of parts that hidden states divide the sequence into.
    """
    micro_batch = _MicroBatch()
    _replace_blocks(model, flow, micro_batch, blocks=blocks, first=first, last=last)
    absent = [
        *(flow.before_blocks if first else ()),
        *(flow.after_blocks if last < len(blocks) else ()),
    ]
    for name in absent:
        end = End(
            model.get_submodule(name),
            shape=flow.shapes.get(name, ()),
            is_written=name in flow.written,
            micro_batch=micro_batch,
        )
        _replace(model, name, end)
    receiving = micro_batch if first else None
    model.forward = _stage_forward(model.forward, receiving, sequence_parts=sequence_parts)
    return model


def _replace_blocks(
    model: nn.Module,
    flow: BlockFlow,
    micro_batch: _MicroBatch,
    *,
    blocks: Sequence[str],
    first: int,
    last: int,
) -> None:
    """Replace the blocks of other stages; the block before the first returns the hidden states.

    The block after the last one ends the forward.
    """
    for number, name in enumerate(blocks):
        if number == last:
            _replace(model, name, LeavingBlock(model.get_submodule(name), model=model))
        elif not first <= number < last:
            _replace(
                model,
                name,
                PassingBlock(
                    model.get_submodule(name),
                    returns=flow.returns[number],
                    micro_batch=micro_batch if number == first - 1 else None,
                ),
            )


def _stage_forward(
    full_forward: Callable[..., Any], micro_batch: _MicroBatch | None, *, sequence_parts: int
) -> Callable[..., Any]:
    """Return the forward of a stage.

    Args:
        full_forward: Forward of the full model, whose absent modules are replaced.
        micro_batch: Takes the hidden states that the stage receives; None if it receives tokens.
        sequence_parts: Number of parts that hidden states divide the sequence into.
    """

    def forward(received: Tensor, **extra: Tensor) -> Any:
        tokens = received
        if micro_batch is not None:
            micro_batch.received = received
            # Code before the blocks depends only on the shape of the tokens.
            batch, length = received.shape[:2]
            size = (batch, length * sequence_parts)
            tokens = torch.zeros(size, dtype=torch.int64, device=received.device)
        try:
            return full_forward(tokens, **extra)
        except _Leaving as leaving:
            hidden = leaving.hidden
            # torch's stages detach their outputs in place, which is not possible for views.
            return hidden.clone() if is_view(hidden) else hidden
        finally:
            if micro_batch is not None:
                micro_batch.received = None

    return forward


@contextmanager
def without(model: nn.Module, flow: BlockFlow, *, blocks: Sequence[str]) -> Iterator[None]:
    """Let a full model temporarily skip some of its blocks."""
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
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent)._modules[child] = module
