"""Reads a parameter that has more rows than the saved one: new tokens of a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from axonlaunch.models.tensors.tensor_origins import OriginTensor, Read

_CHUNK_BYTES = 16 << 20
"""Bytes of fp64 values that are averaged at a time."""


@dataclass(frozen=True)
class GrownRows:
    """A parameter that begins with the rows of another one; each further row is their mean.

    The mean of a pretrained embedding keeps a new token's logit near those of the others (Hewitt,
    "Initializing New Word Embeddings for Pretrained Language Models", 2021). It is computed in fp64
    from all saved rows, so it does not depend on how rows are divided over ranks.

    Attributes:
        saved: The saved parameter, [rows, ...].
        rows: Number of rows, more than those saved.
    """

    saved: OriginTensor
    rows: int

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter."""
        return torch.Size([self.rows, *self.saved.shape[1:]])

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources of all pieces."""
        return self.saved.sources

    def read(
        self, read: Read, offsets: Sequence[int], lengths: Sequence[int], into: Tensor
    ) -> None:
        """Fill a tensor with a region of the parameter.

        Args:
            read: Reads a region of a source by name.
            offsets: First index of the region in each dimension.
            lengths: Size of the region in each dimension.
            into: Tensor [*lengths] to fill in place.
        """
        first, *columns = offsets
        count, *widths = lengths
        old = min(count, max(0, self.saved.shape[0] - first))
        if old:
            self.saved.read(read, offsets, [old, *widths], into[:old])
        if old < count:
            into[old:].copy_(
                self._mean(read, columns, widths, like=into).expand(count - old, *widths)
            )

    def _mean(
        self, read: Read, offsets: Sequence[int], lengths: Sequence[int], *, like: Tensor
    ) -> Tensor:
        """Return the mean of the saved rows in a region of the other dimensions, fp64."""
        total = torch.zeros(tuple(lengths), dtype=torch.float64)
        rows = self.saved.shape[0]
        step = max(1, _CHUNK_BYTES // max(1, total.nbytes))
        for start in range(0, rows, step):
            count = min(step, rows - start)
            part = torch.empty((count, *lengths), dtype=torch.float64)
            self.saved.read(read, (start, *offsets), (count, *lengths), part)
            total += part.sum(0)
        return (total / rows).to(like.device)


def grow_vocabulary(parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the sources of parameters; those with too few rows are grown.

    Args:
        parameters: Source of each parameter.
        sizes: Number of rows that the model has, by the names of the embedding and the head.
    """
    grown = dict(parameters)
    for name, rows in sizes.items():
        saved = parameters.get(name)
        if isinstance(saved, OriginTensor) and saved.ndim and saved.shape[0] < rows:
            grown[name] = GrownRows(saved, rows)
    return grown
