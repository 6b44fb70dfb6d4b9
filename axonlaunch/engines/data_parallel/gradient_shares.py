"""The gradients of one bucket: fills the bucket, sends it, and writes the mean.

``GradientSynchronizer`` decides when buckets are sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.averaging.gradient_bucket import GradientBucket
from axonlaunch.comm.averaging.row_bucket import RowBucket
from axonlaunch.comm.mesh import local_part


def no_gradient(parameter: Tensor) -> Tensor:
    """Return zeros in the shape and type of a parameter's gradient."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype)


class GradientShare(ABC):
    """The gradients of one bucket.

    Attributes:
        parameters: Parameters whose gradients are in the bucket.
        bucket: Communication buffer. Its end holds one flag per gradient: whether it was present.
        missing: Parameters with incomplete gradients.
    """

    bucket: GradientBucket | RowBucket

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = set(parameters)
        self._absent: list[int] = []

    @abstractmethod
    def start(self) -> None:
        """Fill the bucket and send it.

        A missing gradient counts as zero, so that ranks that used different parameters agree.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait for the means and assign them to the parameters.

        A parameter without gradient on every rank has no gradient afterwards, as in single-process
        training, so weight decay does not change it.
        """

    def clear(self) -> None:
        """Reset to the state before a backward."""
        self.bucket.clear()
        self.missing = set(self.parameters)

    def _gradients(self) -> tuple[list[Tensor], Tensor]:
        """Return all gradients, with zeros for missing ones, and a presence flag for each."""
        self._absent = [n for n, parameter in enumerate(self.parameters) if parameter.grad is None]
        gradients = [no_gradient(p) if p.grad is None else p.grad for p in self.parameters]
        local = [local_part(gradient.detach()) for gradient in gradients]
        present = local[0].new_ones(len(local))
        if self._absent:  # indexing with host data makes the host wait for the device
            present[self._absent] = 0.0
        return local, present

    def _absent_everywhere(self, present: Tensor) -> list[nn.Parameter]:
        """Return the parameters without gradient on every rank.

        Checks only gradients missing on this rank, because reading the flags makes the host wait
        for the device.
        """
        return [self.parameters[number] for number in self._absent if not present[number]]


class WholeGradients(GradientShare):
    """Averages gradients in place: every rank gets the full mean."""

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
            self.parameters[number].grad = no_gradient(self.parameters[number])
        gradients = [local_part(p.grad) for p in self.parameters if p.grad is not None]
        torch._foreach_copy_(gradients, means)
        for parameter in self._absent_everywhere(present):
            parameter.grad = None
        self.clear()


class RowGradients(GradientShare):
    """Averages gradients so that every rank gets the mean of its rows; frees the full gradients."""

    bucket: RowBucket

    def __init__(
        self,
        parameters: list[nn.Parameter],
        *,
        group: ProcessGroup,
        dtype: torch.dtype | None,
        rows: dict[Tensor, Tensor],
    ) -> None:
        """Create the bucket.

        Args:
            parameters: Parameters whose gradients the bucket holds.
            group: The ranks; rows are divided among them in this order.
            dtype: Type in which gradients are summed; None for the type of the gradients.
            rows: Receives the means, by parameter; existing entries are added to.
        """
        super().__init__(parameters)
        self._group, self._rows = group, rows
        shapes = [local_part(parameter.detach()).shape for parameter in parameters]
        shapes.append(torch.Size((group.size, len(parameters))))
        self.bucket = RowBucket(shapes, group=group, dtype=dtype)

    def start(self) -> None:
        """Fill the bucket, free the gradients and send it."""
        gradients, present = self._gradients()
        present_for_all = present.repeat(
            self._group.size, 1
        )  # contiguous, so CUDA packs all at once
        self.bucket.start([*gradients, present_for_all])
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self) -> None:
        """Wait for the mean of this rank's rows and add it to ``rows``."""
        *means, [present] = self.bucket.finish()
        skipped = set(self._absent_everywhere(present))
        for parameter, mean in zip(self.parameters, means, strict=True):
            if parameter not in skipped:
                row = mean.to(parameter.grad_dtype)
                previous = self._rows.get(parameter)
                self._rows[parameter] = row if previous is None else previous + row
        self.clear()
