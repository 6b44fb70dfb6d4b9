"""Maps a model's parameters to the tensors of safetensors files that contain them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from axonlaunch.models.tensors.grown_rows import GrownRows
from axonlaunch.models.tensors.tensor_origins import OriginTensor, Read


@dataclass(frozen=True)
class Computed:
    """A parameter that is computed from full tensors of a checkpoint and can't be read in part.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the parameter.
        sources: Names of the checkpoint's tensors.
        convert: Maps tensors by name to parameters by name.
    """

    name: str
    shape: torch.Size
    sources: tuple[str, ...]
    convert: Callable[[Mapping[str, Any]], dict[str, Any]]

    def read(
        self, read: Read, offsets: Sequence[int], lengths: Sequence[int], into: Tensor
    ) -> None:
        """Fill a tensor with a region of the parameter; the full parameter is in memory meanwhile.

        Args:
            read: Reads a source by name; an empty region reads all of it.
            offsets: First index of the region in each dimension.
            lengths: Size of the region in each dimension.
            into: Tensor [*lengths] to fill in place.
        """
        region = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        values = self.convert({name: read(name, ()) for name in self.sources})[self.name]
        into.copy_(values[region])


@dataclass(frozen=True)
class SavedTensors:
    """Sources of a model's parameters in a checkpoint.

    Attributes:
        parameters: Source of each parameter by name.
        unexpected: Names of tensors that the model does not use.
    """

    parameters: Mapping[str, OriginTensor | Computed | GrownRows]
    unexpected: tuple[str, ...] = ()

    @classmethod
    def with_same_names(cls, shapes: Mapping[str, Sequence[int]]) -> Self:
        """Return the sources of parameters that are saved under their names."""
        return cls({name: OriginTensor.full(name, shape) for name, shape in shapes.items()})
