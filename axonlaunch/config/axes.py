"""Table of the kinds of parallelism with a degree: tensor, pipeline and context parallelism.

Code that treats these axes alike loops over ``AXES``. The two data axes have no entry, because
their sizes follow from the number of remaining ranks. The expert axis has none either, because it
regroups the ranks of other axes for the parameters of experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from axonlaunch.config.schema import StrategyConfig

Divided = Literal["layers", "blocks", "sequences"]

DP_REPLICATE, DP_SHARD = "dp_replicate", "dp_shard"
"""Names of the data axes: replicas of the parameters, and ranks that shard each replica."""
EXPERT_SHARD, EXPERT = "efsdp", "ep"
"""Names of the axes of the experts' mesh. It has the same ranks as the run's mesh. In each replica,
``ep`` ranks share the experts of a layer, and ``efsdp`` ranks shard the parameters of each expert.
"""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One mesh axis with a degree in ``strategy``.

    Attributes:
        name: Name of the mesh axis.
        word: Section of ``strategy`` with the degree, and the word for the axis in messages.
        depth: Position in the mesh, outermost first; the data axes are at 0.
        divides: Kind of content that is divided among the ranks of the axis.
        ranks: Description of these ranks for messages.
    """

    name: str
    word: str
    depth: int
    divides: Divided
    ranks: str

    @property
    def key(self) -> str:
        """Configuration key of the degree."""
        return f"strategy.{self.word}.degree"

    @property
    def sums_gradients(self) -> bool:
        """Whether each of these ranks computes a part of the gradients of the same parameters.

        Data parallelism then treats them like data-parallel ranks: it sums their gradients and can
        shard over them.
        """
        return self.divides == "sequences"

    @property
    def divides_parameters(self) -> bool:
        """Whether these ranks hold different parameters."""
        return self.divides in ("layers", "blocks")

    @property
    def same_outputs(self) -> bool:
        """Whether these ranks compute the same outputs of a layer.

        They draw the same random numbers, for example for dropout, and only one of them reports a
        loss.
        """
        return self.divides not in ("blocks", "sequences")

    def degree(self, strategy: StrategyConfig) -> int:
        """Return the number of ranks along the axis."""
        degree: int = getattr(strategy, self.word).degree
        return degree


AXES = (
    Axis(
        name="tp",
        word="tensor",
        depth=2,
        divides="layers",
        ranks="ranks that share a layer",
    ),
    Axis(
        name="pp",
        word="pipeline",
        depth=-1,
        divides="blocks",
        ranks="ranks that share the blocks",
    ),
    Axis(
        name="cp",
        word="context",
        depth=1,
        divides="sequences",
        ranks="ranks that share a sequence",
    ),
)
"""All axes with a degree, in the order of the keys."""

OUTER = tuple(sorted((axis for axis in AXES if axis.depth < 0), key=lambda axis: axis.depth))
"""Axes outside of the data axes, outermost first."""
INNER = tuple(sorted((axis for axis in AXES if axis.depth > 0), key=lambda axis: axis.depth))
"""Axes inside of the data axes, outermost first."""
PRINTED = (*INNER, *OUTER)
"""All axes in the order in which layouts are printed, after data parallelism."""
LIKE_DATA = tuple(axis.name for axis in INNER if axis.sums_gradients)
"""Names of the axes that the mesh of a run merges into a data axis."""
LAYER_AXES = (*(axis.name for axis in AXES if axis.divides == "layers"), EXPERT)
"""Names of the axes with ranks that compute with their parts of the parameters of a layer."""
DATA_AXES = (DP_REPLICATE, DP_SHARD, *LIKE_DATA)
"""Names of the axes with ranks that hold the same parameters or shards of them."""


def degrees_of(strategy: StrategyConfig) -> dict[str, int]:
    """Return the degree of each axis by its name, outermost first."""
    return {axis.name: axis.degree(strategy) for axis in (*OUTER, *INNER)}


def divisor(degrees: Mapping[str, int], divided: Divided) -> int:
    """Return the number of ranks that layers, blocks or sequences are divided among.

    Args:
        degrees: Degree of each axis by its name.
        divided: Kind of content: ``"layers"``, ``"blocks"`` or ``"sequences"``.
    """
    return math.prod(degrees[axis.name] for axis in AXES if axis.divides == divided)
