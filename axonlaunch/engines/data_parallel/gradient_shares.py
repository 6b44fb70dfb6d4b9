"""Parameters whose gradients travel in one bucket: what is sent, and where the mean goes.

When they go is the synchronizer's to say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.gradient_bucket import GradientBucket
from axonlaunch.comm.row_bucket import RowBucket
from axonlaunch.engines.optimizer.clipping import local_part


class GradientShare(ABC):
    """The gradients of one bucket.

    Attributes:
        parameters: Whose they are.
        bucket: What they travel in. Behind them, for each: whether there was one.
        missing: Parameters whose gradients are not complete yet.
    """

    bucket: GradientBucket | RowBucket

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = set(parameters)
        self._absent: list[int] = []

    @abstractmethod
    def start(self) -> None:
        """Fill the bucket and send it.

        A missing gradient counts as zero, so that ranks which used different parts agree.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait for the mean and give each parameter its own.

        What no rank had a gradient of has none, as in one process: weight decay leaves it alone.
        """

    def clear(self) -> None:
        """Reset to the state before a backward."""
        self.bucket.clear()
        self.missing = set(self.parameters)

    def _gradients(self) -> tuple[list[Tensor], Tensor]:
        """Return all gradients, zeros for those that are missing, and which are there."""
        self._absent = [n for n, parameter in enumerate(self.parameters) if parameter.grad is None]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        local = [local_part(gradient.detach()) for gradient in gradients]
        present = local[0].new_ones(len(local))
        if self._absent:  # an index from the host, for which it waits until the device has it
            present[self._absent] = 0.0
        return local, present

    def _of_no_rank(self, present: Tensor) -> list[nn.Parameter]:
        """Return the parameters of which no rank had a gradient.

        Looked at where one was missing, for it makes the host wait for the device.
        """
        return [self.parameters[number] for number in self._absent if not present[number]]


class WholeGradients(GradientShare):
    """Gradients of which every rank gets the whole mean, in their place."""

    bucket: GradientBucket

    def __init__(
        self, parameters: list[nn.Parameter], *, group: ProcessGroup, dtype: torch.dtype | None
    ) -> None:
        super().__init__(parameters)
        self._group = group
        elements = sum(local_part(parameter.detach()).numel() for parameter in parameters)
        self.bucket = GradientBucket(elements + len(parameters), dtype=dtype)

    def start(self) -> None:
        """Fill the bucket and send it."""
        gradients, present = self._gradients()
        has_room = self.bucket.add_all([*gradients, present])
        assert has_room
        self.bucket.start(self._group.torch_group)

    def finish(self) -> None:
        """Wait for the mean and copy it to the gradients."""
        self.bucket.finish()
        *means, present = self.bucket.extract()
        for number in self._absent:
            self.parameters[number].grad = torch.zeros_like(self.parameters[number])
        gradients = [local_part(p.grad) for p in self.parameters if p.grad is not None]
        torch._foreach_copy_(gradients, means)
        for parameter in self._of_no_rank(present):
            parameter.grad = None
        self.clear()


class RowGradients(GradientShare):
    """Gradients of which every rank gets the mean of its own rows; the whole ones are freed."""

    bucket: RowBucket

    def __init__(
        self,
        parameters: list[nn.Parameter],
        *,
        group: ProcessGroup,
        dtype: torch.dtype | None,
        rows: dict[Tensor, Tensor],
    ) -> None:
        """Lay a bucket out.

        Args:
            parameters: Whose gradients it is for.
            group: The ranks, among which rows are divided in its order.
            dtype: Type in which gradients are summed; None: their own.
            rows: Where the means go, by parameter; to what is there they are added.
        """
        super().__init__(parameters)
        self._group, self._rows = group, rows
        shapes = [local_part(parameter.detach()).shape for parameter in parameters]
        shapes.append(torch.Size((group.size, len(parameters))))
        self.bucket = RowBucket(shapes, group=group, dtype=dtype)

    def start(self) -> None:
        """Fill the bucket, free the gradients and send it."""
        gradients, present = self._gradients()
        everyones = present.repeat(self._group.size, 1)  # CUDA packs contiguous tensors at once
        self.bucket.start([*gradients, everyones])
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self) -> None:
        """Wait for the mean of this rank's rows and add it to ``rows``."""
        *means, [present] = self.bucket.finish()
        skipped = set(self._of_no_rank(present))
        for parameter, mean in zip(self.parameters, means, strict=True):
            if parameter not in skipped:
                row = mean.to(parameter.dtype)
                before = self._rows.get(parameter)
                self._rows[parameter] = row if before is None else before + row
        self.clear()
