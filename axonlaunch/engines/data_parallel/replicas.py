"""Ranks that hold whole parameters, and what keeps them in step around backward and update.

It wraps no forward but DDP's; what shards parameters is ``fsdp``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.data_parallel import DATA_PARALLEL
from axonlaunch.config.schema import StrategyConfig
from axonlaunch.engines.data_parallel.ddp import DDP
from axonlaunch.engines.data_parallel.gradient_synchronizer import GradSyncStrategy
from axonlaunch.engines.precision.policy import DTYPES


class Replicas:
    """Base of data-parallel variants that a package registers; every method is called on all ranks.

    Attributes:
        module: This rank's part of the model, whole along the data ranks.
        group: The data ranks, of which each trains on samples of its own.
        options: ``strategy.options``.
        rows: Of a variant that gives each rank the gradients of its own rows alone: those, by
            parameter, after ``after_backward``. None: gradients are whole, in the parameters.
    """

    rows: MutableMapping[Tensor, Tensor] | None = None

    def __init__(self, module: nn.Module, *, group: ProcessGroup, options: Any) -> None:
        self.module = module
        self.group = group
        self.options = options

    def after_backward(self) -> None:
        """Do what a step's gradients need, once all of its micro-batches are through."""

    def after_update(self, *, step: int) -> None:
        """Do what an update needs; ``step`` have been done."""

    def agree(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the same values of what a checkpoint is to hold, in place.

        Args:
            tensors: Parameters and optimizer states. Training continues with what is left in them,
                so that a run which is resumed is the one that was saved.
        """


class AveragedGradients(Replicas):
    """Replicas by DDP: gradients are averaged in every step, so that all ranks stay the same."""

    def __init__(self, replicas: DDP, *, group: ProcessGroup, scatters_rows: bool = False) -> None:
        super().__init__(replicas, group=group, options=None)
        self._replicas = replicas
        if scatters_rows and group.size > 1:
            self.rows = replicas.synchronizer.rows

    def after_backward(self) -> None:
        """Average what backward left apart.

        Raises:
            ConfigError: A parameter got no gradient, and buckets of gradients wait for it.
        """
        if self._replicas.sync is GradSyncStrategy.NO_SYNC:
            self._replicas.sync_gradients()
        if not self._replicas.has_averaged():
            names = self._replicas.parameters_without_grad() or ["a parameter"]
            listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            message = f"{listed} got no gradient, for which the others wait; use synchronous"
            raise ConfigError([ConfigIssue("strategy.ddp.sync", message, "overlapped")])


def make_replicas(
    strategy: StrategyConfig,
    module: nn.Module,
    *,
    kind: str,
    group: ProcessGroup,
    sync: GradSyncStrategy | str,
) -> Replicas | None:
    """Keep whole copies of a module in step, as a data-parallel variant does.

    Args:
        strategy: The run's.
        module: This rank's, filled with its weights.
        kind: The variant; it shards no parameters.
        group: The data ranks.
        sync: When DDP averages gradients.

    Returns:
        What does it, whose ``module`` is to be called in the module's place; None where there is
        nothing to keep in step.
    """
    entry = DATA_PARALLEL.entry(kind)
    if entry.target is not None:
        replicas: Replicas = DATA_PARALLEL.get(kind)(module, group=group, options=strategy.options)
        return replicas
    if DATA_PARALLEL.facts(kind).averages == "nothing":
        return None
    ddp, reduce = strategy.ddp, strategy.reduce_dtype
    scatters_rows = DATA_PARALLEL.facts(kind).divides_update
    own = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
    averaged = DDP(
        module,
        group=group,
        sync=sync,
        bucket_size_mb=ddp.bucket_size_mb,
        broadcast_buffers=ddp.broadcast_buffers,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view,
        reduce_dtype=None if own == {DTYPES[reduce]} else DTYPES[reduce],
        scatters_rows=scatters_rows,
        waits_in_backward=strategy.context.degree == 1,
    )
    return AveragedGradients(averaged, group=group, scatters_rows=scatters_rows)
