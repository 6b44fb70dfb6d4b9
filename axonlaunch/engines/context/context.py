"""Context parallelism: each rank holds some positions of every sequence.

This module splits batches, adjusts the positions used by models, and joins outputs. Attention
across ranks is in ``ring_attention``. Gradients are summed over these ranks as over data-parallel
ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import all_gather_from_group, collect_from
from axonlaunch.comm.checks.argument_checks import device_of
from axonlaunch.config.schema import StrategyConfig
from axonlaunch.data.datasets.dataset import Batch
from axonlaunch.engines.context.ring_attention import ring_attention
from axonlaunch.models.modules.attention import Attention, Packing, RotaryTable, SequenceParts
from axonlaunch.models.specs.model_spec import ModelSpec

CHUNKS = 2
"""Pieces of a sequence per rank: one near its start and one near its end, which balances the work
of the causal mask.
"""


class ContextAxis:
    """The ranks that share every sequence, from the view of one rank."""

    def __init__(self, group: ProcessGroup) -> None:
        """Create the axis.

        Args:
            group: The ranks that share every sequence.
        """
        self._group = group
        self._parts: dict[int, Tensor] = {}

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of those that share its sequences."""
        return self._group.rank == 0

    def positions(self, length: int) -> Tensor:
        """Return this rank's positions of a sequence, [length / ranks] int64.

        Raises:
            ValueError: The length cannot be divided into ``CHUNKS`` pieces per rank.
        """
        pieces = CHUNKS * self._group.size
        if length % pieces:
            raise ValueError(
                f"a sequence of {length} cannot be split among {self._group.size} ranks in "
                f"{CHUNKS} pieces each; use a multiple of {pieces}"
            )
        first, last = self._group.rank, pieces - 1 - self._group.rank
        chunks = torch.arange(length).chunk(pieces)
        return torch.cat((chunks[first], chunks[last]))

    def split(self, batch: Batch) -> Batch:
        """Return this rank's positions of every sequence of a batch [B, T]."""
        part = self._positions_on_device(batch.inputs.shape[1])
        # Index on the device: the result of indexing on the host is not in pinned memory, so
        # copying it would block.
        return batch.map(lambda tensor: tensor.to(part.device, non_blocking=True)[:, part])

    def join(self, outputs: Tensor) -> Tensor:
        """Gather outputs of full sequences [B, T, ...] from the ranks' parts."""
        return self._sequence_order(collect_from(outputs, self._group, 1), dim=1)

    def gather(self, heads: Tensor) -> Tensor:
        """Gather keys or values of full sequences [B, heads, T, head_dim] from the ranks' parts."""
        return self._sequence_order(all_gather_from_group(heads, self._group, 2), dim=2)

    def shard_sequences(self, spec: ModelSpec, model: nn.Module) -> None:
        """Modify a model or pipeline stage in place to compute on parts of sequences."""
        if spec.shard_sequences is not None:
            ring: Any = partial(ring_attention, group=self._group)
            parts = SequenceParts(self._local_positions, self.gather, ring, self._group.size)
            spec.shard_sequences(model, parts)
            return
        for module in model.modules():
            if isinstance(module, Attention):
                module.attend = partial(self._attend, module)  # type: ignore[method-assign]
        if spec.shards_documents:
            any_model: Any = model
            any_model.find_documents = self._find_documents
        for name in spec.positions or ():
            position_module = getattr(model, name, None)
            if isinstance(position_module, RotaryTable):
                position_module.positions = self._local_positions
            elif isinstance(position_module, nn.Module):
                position_module.register_forward_pre_hook(self._shift_positions)

    def _shift_positions(self, _: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """Replace positions 0, 1, ... by those of this rank's part; keep positions in documents."""
        (positions,) = inputs
        return (
            positions
            if positions.ndim > 1
            else self._local_positions(len(positions)).to(positions.device),
        )

    def _attend(
        self, module: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attend from this rank's part to full sequences: as a ring, or at once for packed rows.

        Packed rows need a document mask, which the ring does not support. Source: Llama Team, "The
        Llama 3 Herd of Models", 2024, section 3.3.2, which gathers keys and values for the same
        reason.
        """
        if mask is None:
            return ring_attention(q, k, v, group=self._group)
        return Attention.attend(module, q, self.gather(k), self.gather(v), mask)

    def _find_documents(self, positions: Tensor | None) -> Packing | None:
        """Return the documents of the full rows and this rank's positions in them."""
        if positions is None:
            return None
        row_positions = self._local_positions(positions.shape[1]).to(positions.device)
        return Packing.of_part(positions, self.join(positions), row_positions)

    def _sequence_order(self, rank_by_rank: Tensor, *, dim: int) -> Tensor:
        """Reorder the concatenated parts of all ranks to the order of the sequence."""
        pieces = rank_by_rank.chunk(CHUNKS * self._group.size, dim=dim)
        return torch.cat([*pieces[0::CHUNKS], *reversed(pieces[1::CHUNKS])], dim=dim)

    def _local_positions(self, length: int) -> Tensor:
        """Return this rank's positions for a local length, on its device; cached for all layers."""
        return self._positions_on_device(length * self._group.size)

    def _positions_on_device(self, length: int) -> Tensor:
        if length not in self._parts:
            self._parts[length] = self.positions(length).to(device_of(self._group))
        return self._parts[length]


def length_multiple(strategy: StrategyConfig) -> int:
    """Return the number that must divide the length of a sequence."""
    pieces = strategy.context.degree * CHUNKS if strategy.context.degree > 1 else 1
    return pieces * (strategy.tensor.degree if strategy.tensor.sequence_parallel else 1)
