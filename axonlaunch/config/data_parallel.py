"""What ranks that hold the same parameters do: the variants, and the properties others go by.

It holds values; ``axonlaunch.engines`` carries them out. Nobody compares names: what follows from a
variant follows from its properties.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from axonlaunch.config.registry import Entry, Registry

DEFAULT, NONE = "ddp", "none"
"""The variant where none is chosen: of several ranks, and of one."""


@dataclass(frozen=True, kw_only=True)
class DataParallelFacts:
    """Properties of a variant.

    Attributes:
        averages: What its ranks average: gradients, in every step, as one process has them;
            parameters, every ``period`` steps; nothing, for there is one rank.
        shards_parameters: Whether a rank keeps a part of each parameter between uses.
        shards_gradients: Whether it keeps a part of each gradient.
        shards_optimizer: Whether it keeps, and updates, a part of each optimizer state.
        section: The part of ``strategy`` that this variant reads, beside what all do.
        period: From ``strategy.options`` to the steps between two averages of parameters.
    """

    averages: Literal["gradients", "parameters", "nothing"] = "gradients"
    shards_parameters: bool = False
    shards_gradients: bool = False
    shards_optimizer: bool = False
    section: str | None = None
    period: Callable[[Any], int] | None = None

    @property
    def keeps_gradients(self) -> bool:
        """Whether ranks add up whole gradients through a step, and average them once, in buckets.

        They get the whole mean, or where they divide the update, that of their own part.
        """
        return self.averages == "gradients" and not self.shards_gradients

    @property
    def divides_update(self) -> bool:
        """Whether ranks of whole parameters update a part each, and then give each other theirs.

        Each is given the gradients of its own part alone.
        """
        return self.shards_optimizer and not self.shards_parameters

    @property
    def is_exact(self) -> bool:
        """Whether it computes what one process does."""
        return self.averages != "parameters"


@dataclass(frozen=True, kw_only=True)
class FreeDataParallelConfig:
    """Options of a registered variant that brought no dataclass of its own."""

    name: str = ""
    """name of the variant"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the variant"""


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
    free_config=FreeDataParallelConfig,
)
"""Those without a target are built by ``engines.build`` from their properties alone."""
