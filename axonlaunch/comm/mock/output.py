"""Output tensors of operations, which are filled when the rank waits for the operation.

As on NCCL, the result of an asynchronous operation is available only after ``wait()``: a rank that
does not wait reads the old values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Output:
    """An output of an operation on one rank.

    Attributes:
        tensor: Tensor to fill. Like a real backend, it is written without autograd and without a
            new version.
    """

    def __init__(self, tensor: Tensor, *, at_once: bool) -> None:
        """Describe the output.

        Args:
            tensor: Tensor that the rank passed to the operation.
            at_once: Whether the rank waits within the same call, so that the result needs no
                storage until then.
        """
        self.tensor = tensor.data
        self._at_once = at_once
        self._result: Tensor | None = None

    def write(self, source: Tensor, *, is_unshared: bool = False) -> None:
        """Store a result; ``is_unshared`` says that no rank refers to ``source``.

        Raises:
            ValueError: ``source`` has a different dtype or number of elements.
        """
        target = self.tensor
        if target.dtype != source.dtype or target.numel() != source.numel():
            raise ValueError(
                f"the output {str(target.dtype)[6:]} {list(target.shape)} does not fit the result "
                f"{str(source.dtype)[6:]} {list(source.shape)}"
            )
        result = source.reshape(target.shape)
        if self._at_once:
            target.copy_(result)
        else:
            self._result = result if is_unshared else result.clone()

    def finish(self) -> bool:
        """Copy a stored result to the tensor; return whether there was one."""
        result, self._result = self._result, None
        if result is not None:
            with torch.inference_mode():
                self.tensor.copy_(result)
        return result is not None


def outputs_of(tensors: Sequence[Tensor], *, at_once: bool) -> list[Output]:
    """Create an output for each tensor."""
    return [Output(tensor, at_once=at_once) for tensor in tensors]


def write_all(outputs: Sequence[Output], sources: Sequence[Tensor]) -> None:
    """Write a source to each output.

    Raises:
        ValueError: The numbers of outputs and sources differ, or a source does not fit.
    """
    if len(outputs) != len(sources):
        raise ValueError(f"{len(outputs)} outputs for {len(sources)} inputs")
    for output, source in zip(outputs, sources, strict=True):
        output.write(source)
