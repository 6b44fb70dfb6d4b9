"""Variants of data parallelism with their properties, and exchanges of rows between experts.

``axonlaunch.engines`` implements them. Other packages decide by the properties of a
variant, not by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from axonlaunch.config.registry import Entry, Registry

DEFAULT, NONE = "ddp", "none"
"""Variants that ``strategy.data_parallel=null`` selects: for several ranks, and for one rank."""


@dataclass(frozen=True, kw_only=True)
class DataParallelFacts:
    """Properties of a variant.

    Attributes:
        averages: Values that the ranks average: ``"gradients"`` in every step, with the same result
            as one process; ``"parameters"`` every ``period`` steps; ``"nothing"`` with one rank.
        shards_parameters: Whether a rank stores only a part of each parameter between uses.
        shards_gradients: Whether a rank stores only a part of each gradient.
        shards_optimizer: Whether a rank stores and updates only a part of each optimizer state.
        section: Section of ``strategy`` with the options of this variant; None without options.
        period: Function from ``strategy.options`` to the steps between two averages of parameters.
    """

    averages: Literal["gradients", "parameters", "nothing"] = "gradients"
    shards_parameters: bool = False
    shards_gradients: bool = False
    shards_optimizer: bool = False
    section: str | None = None
    period: Callable[[Any], int] | None = None

    @property
    def keeps_gradients(self) -> bool:
        """Whether ranks accumulate full gradients during a step, and average them once, in buckets.

        Each rank receives the full mean, or only its part if ``divides_update``.
        """
        return self.averages == "gradients" and not self.shards_gradients

    @property
    def divides_update(self) -> bool:
        """Whether ranks with full parameters each update a part, and then gather the other parts.

        Each rank receives only the gradients of its part.
        """
        return self.shards_optimizer and not self.shards_parameters

    @property
    def is_exact(self) -> bool:
        """Whether the results are those of one process."""
        return self.averages != "parameters"


DATA_PARALLEL: Registry[Callable[..., Any], DataParallelFacts] = Registry(
    "data_parallel",
    {
        "none": Entry(None, "one rank", facts=DataParallelFacts(averages="nothing")),
        "ddp": Entry(None, "replicas", facts=DataParallelFacts(section="ddp")),
        "zero1": Entry(
            None,
            "replicas with sharded optimizer states",
            facts=DataParallelFacts(shards_optimizer=True, section="ddp"),
        ),
        "fsdp": Entry(
            None,
            "sharded parameters, gradients and optimizer states",
            facts=DataParallelFacts(
                shards_parameters=True, shards_gradients=True, shards_optimizer=True, section="fsdp"
            ),
        ),
    },
    entry_points="axonlaunch.data_parallel",
)
"""Variants by name; ``engines.build`` builds those without a target from their properties."""

DISPATCHES: Registry[Callable[..., Any], None] = Registry(
    "dispatch",
    {
        "all_to_all": Entry(
            "axonlaunch.engines.expert.dispatch:AllToAll",
            "one all-to-all of rows to the experts, and one back",
        )
    },
    entry_points="axonlaunch.dispatches",
)
"""Exchanges of rows between the ranks that share experts, by name."""
