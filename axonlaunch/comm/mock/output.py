"""A tensor that an operation fills, and when it does: at ``wait()``, if the rank may come to it.

As on NCCL, what an asynchronous operation brings is there only after it was waited for: a rank
that forgets to reads what stood there before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Output:
    """An output of one rank.

    Attributes:
        tensor: Where what arrives is to be in the end; out of autograd's sight: like a real
            backend, it is written without a new version.
    """

    def __init__(self, tensor: Tensor, *, at_once: bool) -> None:
        """Describe it.

        Args:
            tensor: What the rank gave.
            at_once: The rank waits in the same call, so that nothing need be kept for it.
        """
        self.tensor = tensor.data
        self._at_once = at_once
        self._kept: Tensor | None = None

    def write(self, source: Tensor, *, is_ours: bool = False) -> None:
        """Take what arrives; ``is_ours`` says that no rank holds ``source``.

        Raises:
            ValueError: It has another dtype or number of elements.
        """
        target = self.tensor
        if target.dtype != source.dtype or target.numel() != source.numel():
            raise ValueError(
                f"the output {str(target.dtype)[6:]} {list(target.shape)} does not fit what it is "
                f"to hold, {str(source.dtype)[6:]} {list(source.shape)}"
            )
        arrived = source.reshape(target.shape)
        if self._at_once:
            target.copy_(arrived)
        else:
            self._kept = arrived if is_ours else arrived.clone()

    def finish(self) -> bool:
        """Put what was kept to its place; return whether there was any."""
        kept, self._kept = self._kept, None
        if kept is not None:
            with torch.inference_mode():
                self.tensor.copy_(kept)
        return kept is not None


def outputs_of(tensors: Sequence[Tensor], *, at_once: bool) -> list[Output]:
    """Make an output of each tensor."""
    return [Output(tensor, at_once=at_once) for tensor in tensors]


def write_all(outputs: Sequence[Output], sources: Sequence[Tensor]) -> None:
    """Give each output its source.

    Raises:
        ValueError: There are more of one than of the other, or one does not fit.
    """
    if len(outputs) != len(sources):
        raise ValueError(f"{len(outputs)} outputs for {len(sources)} inputs")
    for output, source in zip(outputs, sources, strict=True):
        output.write(source)
