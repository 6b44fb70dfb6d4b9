"""Data-parallel variants with full parameters, synchronized around backward and update.

Only DDP wraps a forward. Sharded parameters are handled by ``fsdp``.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.axes import degrees_of, divisor
from axonlaunch.config.options.data_parallel import DATA_PARALLEL
from axonlaunch.config.precision import NUMBER_FORMATS
from axonlaunch.config.schema import StrategyConfig
from axonlaunch.engines.data_parallel.ddp import DDP
from axonlaunch.engines.data_parallel.gradient_synchronizer import GradSyncStrategy
from axonlaunch.models.torch_dtypes import torch_dtype


class Replicas:
    """Base class of registered data-parallel variants; all ranks must call every method.

    Attributes:
        module: This rank's part of the model, complete along the data axis.
        group: The data-parallel ranks; each trains on different samples.
        options: Value of ``strategy.options``.
        rows: Gradients of this rank's rows, by parameter, valid after ``after_backward``, if the
            variant gives each rank only those. None if the parameters hold full gradients.
    """

    rows: MutableMapping[Tensor, Tensor] | None = None

    def __init__(self, module: nn.Module, *, group: ProcessGroup, options: Any) -> None:
        self.module = module
        self.group = group
        self.options = options

    def after_backward(self) -> None:
        """Process a step's gradients; called after the backward of all its micro-batches."""

    def after_update(self, *, step: int) -> None:
        """Process an update; called when ``step`` updates have been done."""

    def agree(self, tensors: Iterable[Tensor]) -> None:
        """Make tensors that a checkpoint will hold equal on all ranks, in place.

        Args:
            tensors: Parameters and optimizer states. Training continues with the agreed values, so
                a resumed run equals the saved one.
        """


class AveragedGradients(Replicas):
    """Replicas with DDP: gradients are averaged in every step, so all ranks stay equal."""

    def __init__(self, replicas: DDP, *, group: ProcessGroup, scatters_rows: bool = False) -> None:
        super().__init__(replicas, group=group, options=None)
        self._replicas = replicas
        if scatters_rows and group.size > 1:
            self.rows = replicas.synchronizer.rows

    def after_backward(self) -> None:
        """Average gradients that backward did not average.

        Raises:
            ConfigError: A parameter got no gradient, and buckets of gradients wait for it.
        """
        if self._replicas.sync is GradSyncStrategy.NO_SYNC:
            self._replicas.sync_gradients()
        if not self._replicas.has_averaged():
            names = self._replicas.parameters_without_grad() or ["a parameter"]
            listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            message = f"{listed} got no gradient, but the other ranks wait for it; use synchronous"
            raise ConfigError([ConfigIssue("strategy.ddp.sync", message, "overlapped")])


def make_replicas(
    strategy: StrategyConfig,
    module: nn.Module,
    *,
    kind: str,
    group: ProcessGroup,
    sync: GradSyncStrategy | str,
) -> Replicas | None:
    """Create the object that keeps full copies of a module equal.

    Args:
        strategy: Parallelization options of the run.
        module: This rank's module, with its initial weights.
        kind: Name of the data-parallel variant; must not shard parameters.
        group: The data-parallel ranks.
        sync: Time at which DDP averages gradients, a ``GradSyncStrategy`` or its value.

    Returns:
        The replicas; call their ``module`` instead of the original. None if the variant averages
        nothing.
    """
    entry = DATA_PARALLEL.entry(kind)
    if entry.target is not None:
        replicas: Replicas = DATA_PARALLEL.get(kind)(module, group=group, options=strategy.options)
        return replicas
    if DATA_PARALLEL.facts(kind).averages == "nothing":
        return None
    ddp, reduce_dtype = strategy.ddp, torch_dtype(NUMBER_FORMATS[strategy.reduce_dtype])
    scatters_rows = DATA_PARALLEL.facts(kind).divides_update
    gradient_dtypes = {
        parameter.grad_dtype for parameter in module.parameters() if parameter.requires_grad
    }
    averaged = DDP(
        module,
        group=group,
        sync=sync,
        bucket_size_mb=ddp.bucket_size_mb,
        broadcast_buffers=ddp.broadcast_buffers,
        reduce_dtype=None if gradient_dtypes == {reduce_dtype} else reduce_dtype,
        scatters_rows=scatters_rows,
        waits_in_backward=divisor(degrees_of(strategy), "sequences") == 1,
    )
    return AveragedGradients(averaged, group=group, scatters_rows=scatters_rows)
