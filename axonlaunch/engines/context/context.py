"""Context parallelism: every sequence divided among ranks, each of which sees its own positions.

It divides batches, gives models their positions and joins outputs; attention across the parts is
``ring_attention``'s. Gradients of the parts are summed as those of data-parallel ranks are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.argument_checks import device_of
from axonlaunch.comm.autograd import all_gather_from_group, collect_from
from axonlaunch.config.schema import StrategyConfig
from axonlaunch.data.dataset import Batch
from axonlaunch.engines.context.ring_attention import ring_attention
from axonlaunch.models.attention import Attention, Packing, RotaryTable, SequenceParts
from axonlaunch.models.spec import ModelSpec

CHUNKS = 2
"""Pieces of a sequence on each rank: one near its start and one near its end, so that the causal
mask leaves every rank as much to do."""


class ContextAxis:
    """The ranks that divide every sequence, from where one of them stands."""

    def __init__(self, group: ProcessGroup) -> None:
        """Take the group that divides sequences.

        Args:
            group: The ranks that divide sequences.
        """
        self._group = group
        self._parts: dict[int, Tensor] = {}

    def positions(self, length: int) -> Tensor:
        """Return this rank's positions of a sequence, [length / ranks] int64.

        Raises:
            ValueError: The length can't be divided into ``CHUNKS`` pieces per rank.
        """
        pieces = CHUNKS * self._group.size
        if length % pieces:
            raise ValueError(
                f"a sequence of {length} can't be divided among {self._group.size} ranks in "
                f"{CHUNKS} pieces each; use a multiple of {pieces}"
            )
        first, last = self._group.rank, pieces - 1 - self._group.rank
        chunks = torch.arange(length).chunk(pieces)
        return torch.cat((chunks[first], chunks[last]))

    def split(self, batch: Batch) -> Batch:
        """Return this rank's positions of every sequence of a batch [B, T]."""
        mine = self._of_whole(batch.inputs.shape[1])
        # On the device: what is indexed on the host is in memory that a copy from waits for.
        return batch.map(lambda tensor: tensor.to(mine.device, non_blocking=True)[:, mine])

    def join(self, outputs: Tensor) -> Tensor:
        """Return the whole sequences' outputs [B, T, ...] from every rank's part."""
        return self._in_order(collect_from(outputs, self._group, 1), dim=1)

    def gather(self, heads: Tensor) -> Tensor:
        """Return keys or values of the whole sequences [B, heads, T, head_dim] from every part."""
        return self._in_order(all_gather_from_group(heads, self._group, 2), dim=2)

    def divide(self, spec: ModelSpec, model: nn.Module) -> None:
        """Let a model, or a stage of one, compute on parts of sequences, in place."""
        if spec.divide is not None:
            ring: Any = partial(ring_attention, group=self._group)
            parts = SequenceParts(self._of_part, self.gather, ring, self._group.size)
            spec.divide(model, parts)
            return
        for module in model.modules():
            if isinstance(module, Attention):
                module.attend = partial(self._attend, module)  # type: ignore[method-assign]
        if spec.divides_documents:
            knowing_documents: Any = model
            knowing_documents.find_documents = self._find_documents
        for name in spec.positions or ():
            knowing = getattr(model, name, None)
            if isinstance(knowing, RotaryTable):
                knowing.positions = self._of_part
            elif isinstance(knowing, nn.Module):
                knowing.register_forward_pre_hook(self._own_positions)

    def _own_positions(self, _: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """Turn positions 0, 1, ... into those of this rank's part; positions in documents stay."""
        (positions,) = inputs
        return (
            positions if positions.ndim > 1 else self._of_part(len(positions)).to(positions.device),
        )

    def _attend(
        self, module: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attend from a part to the whole; in packed rows, whose mask no ring knows, all at once.

        Source: Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.2, which gathers keys
        and values for the sake of document masks.
        """
        if mask is None:
            return ring_attention(q, k, v, group=self._group)
        return Attention.attend(module, q, self.gather(k), self.gather(v), mask)

    def _find_documents(self, positions: Tensor | None) -> Packing | None:
        """Return where a part's documents lie in the whole rows."""
        if positions is None:
            return None
        places = self._of_part(positions.shape[1]).to(positions.device)
        return Packing.of_part(positions, self.join(positions), places)

    def _in_order(self, rank_by_rank: Tensor, *, dim: int) -> Tensor:
        """Concatenate the parts of all ranks in the order of the sequence."""
        pieces = rank_by_rank.chunk(CHUNKS * self._group.size, dim=dim)
        return torch.cat([*pieces[0::CHUNKS], *reversed(pieces[1::CHUNKS])], dim=dim)

    def _of_part(self, length: int) -> Tensor:
        """Return this rank's positions on its device, cached: every layer asks for them."""
        return self._of_whole(length * self._group.size)

    def _of_whole(self, length: int) -> Tensor:
        if length not in self._parts:
            self._parts[length] = self.positions(length).to(device_of(self._group))
        return self._parts[length]


def length_multiple(strategy: StrategyConfig) -> int:
    """Return what the length of a sequence must be a multiple of."""
    pieces = strategy.context.degree * CHUNKS if strategy.context.degree > 1 else 1
    return pieces * (strategy.tensor.degree if strategy.tensor.sequence_parallel else 1)
