"""Computes the layout of a run on a number of ranks: sizes of mesh axes and micro-batches.

The functions only compute; ``rules`` and ``degree_rules`` check the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

from axonlaunch.config.axes import (
    AXES,
    DP_REPLICATE,
    DP_SHARD,
    EXPERT,
    EXPERT_SHARD,
    INNER,
    LIKE_DATA,
    OUTER,
    PRINTED,
    Divided,
    degrees_of,
    divisor,
)
from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.config.options.data_parallel import DATA_PARALLEL, DEFAULT, NONE, DataParallelFacts
from axonlaunch.config.options.launch import LaunchConfig
from axonlaunch.config.problems.errors import divisors
from axonlaunch.config.schema import RunConfig, StrategyConfig
from axonlaunch.config.values.plain_values import with_values


@dataclass(frozen=True, kw_only=True)
class ParameterDivision:
    """Mesh axes whose ranks share one parameter.

    Attributes:
        shard_axes: Axes over which data parallelism shards whatever it shards of the parameter: the
            parameter itself in fsdp, only its optimizer states in zero1. Empty in ddp.
        sum_axes: Axes over which its gradients are summed.
    """

    shard_axes: tuple[str, ...]
    sum_axes: tuple[str, ...]

    @property
    def replicate_axes(self) -> tuple[str, ...]:
        """Axes of replicas, whose gradients are summed and not scattered."""
        return tuple(axis for axis in self.sum_axes if axis not in self.shard_axes)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the mesh axes, and of a rank's share of a step.

    Attributes:
        data_parallel: Name of the data-parallel variant; ``null`` is resolved.
        dp_replicate: Number of ranks that hold the same shard.
        dp_shard: Number of ranks that one copy of the parameters is divided among.
        degrees: Degree of each axis of ``config.axes.AXES`` by its name.
        expert: Number of ranks that the experts of a layer are divided among.
        schedule: Name of the pipeline schedule.
        stages_per_rank: Number of pipeline stages on each rank.
        micro_batch_size: Samples per forward on one rank.
        micro_batches: Forwards per optimizer step on one rank (gradient accumulation).
        microbatches_per_round: Micro-batches in one round of the pipeline schedule.
    """

    data_parallel: str
    dp_replicate: int
    dp_shard: int
    degrees: dict[str, int]
    expert: int
    schedule: str
    stages_per_rank: int
    micro_batch_size: int
    micro_batches: int
    microbatches_per_round: int

    @classmethod
    def of(cls, config: RunConfig, *, world_size: int) -> Self:
        """Compute the layout of a run on ``world_size`` ranks; quotients are rounded down."""
        strategy = config.strategy
        ranks = max(1, world_size // model_ranks(strategy))
        replicate = replicas(config, world_size=world_size)
        size, count = _micro_batches(config, share=max(1, config.train.global_batch_size // ranks))
        per_round = strategy.pipeline.microbatches
        return cls(
            data_parallel=data_parallel(strategy, world_size=world_size),
            dp_replicate=replicate,
            dp_shard=max(1, ranks // replicate),
            degrees=degrees_of(strategy),
            expert=strategy.expert.degree,
            schedule=strategy.pipeline.schedule,
            stages_per_rank=stages_per_rank(strategy),
            micro_batch_size=size,
            micro_batches=count,
            microbatches_per_round=count if per_round == "auto" else min(per_round, count),
        )

    @property
    def facts(self) -> DataParallelFacts:
        """Properties of the data-parallel variant."""
        return DATA_PARALLEL.facts(self.data_parallel)

    @property
    def pipeline(self) -> int:
        """Number of ranks that the blocks are divided among."""
        return self.degrees["pp"]

    @property
    def context(self) -> int:
        """Number of ranks that each sequence is divided among."""
        return self.degrees["cp"]

    @property
    def tensor(self) -> int:
        """Number of ranks that each layer is divided among."""
        return self.degrees["tp"]

    def divisor(self, divided: Divided) -> int:
        """Return the number of ranks that layers, blocks or sequences are divided among.

        Args:
            divided: Kind of content: ``"layers"``, ``"blocks"`` or ``"sequences"``.
        """
        return divisor(self.degrees, divided)

    def division(self, *, is_expert: bool = False) -> ParameterDivision:
        """Return the mesh axes whose ranks share a parameter.

        Args:
            is_expert: Whether the parameter belongs to experts.
        """
        if is_expert and self.expert > 1:
            return ParameterDivision(
                shard_axes=(EXPERT_SHARD,), sum_axes=(DP_REPLICATE, EXPERT_SHARD)
            )
        facts, merged_into = self.facts, self._merged_into
        replicas = (DP_REPLICATE, *(LIKE_DATA if merged_into == DP_REPLICATE else ()))
        if facts.shards_parameters:
            shards = (DP_SHARD, *(LIKE_DATA if merged_into == DP_SHARD else ()))
            return ParameterDivision(shard_axes=shards, sum_axes=(*replicas, *shards))
        shards_others = facts.shards_gradients or facts.shards_optimizer
        return ParameterDivision(shard_axes=replicas if shards_others else (), sum_axes=replicas)

    @property
    def _merged_into(self) -> str:
        """Data axis of the run's mesh that includes the axes in ``LIKE_DATA``."""
        is_replicated = self.dp_replicate == self.data_ranks > 1
        return DP_REPLICATE if is_replicated or not self.facts.shards_parameters else DP_SHARD

    def ranks_along(self, names: Iterable[str]) -> int:
        """Return the number of ranks along several axes of ``axes`` or ``expert_axes``."""
        sizes = {**self.expert_axes, **self.axes}
        return math.prod(sizes[name] for name in names)

    @property
    def parameter_shards(self) -> int:
        """Number of data-parallel ranks that each parameter is divided among."""
        return self._shards() if self.facts.shards_parameters else 1

    @property
    def gradient_shards(self) -> int:
        """Number of data-parallel ranks that each gradient is divided among at the end of backward.

        If only the update is divided, this needs a single backward per step and full sequences:
        several backwards accumulate full gradients, and ranks that share sequences have gradients
        in flight.
        """
        has_one_backward = self.micro_batches == 1 and self.pipeline == 1
        frees_rest = self.facts.divides_update and has_one_backward and not self.divides_sequences
        return self._shards() if self.facts.shards_gradients or frees_rest else 1

    @property
    def optimizer_shards(self) -> int:
        """Number of data-parallel ranks that each optimizer state is divided among."""
        return self._shards() if self.facts.shards_optimizer else 1

    def _shards(self) -> int:
        return self.ranks_along(self.division().shard_axes)

    @property
    def parameter_divisor(self) -> int:
        """Number of ranks with different parameters, not counting shards of data parallelism."""
        return self.ranks_along(axis.name for axis in AXES if axis.divides_parameters)

    @property
    def divides_sequences(self) -> bool:
        """Whether ranks share sequences, and so exchange parts of them in a backward."""
        return self.divisor("sequences") > 1

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def gradient_ranks(self) -> int:
        """Number of ranks over which the gradient of a parameter is summed."""
        return self.ranks_along(self.division().sum_axes)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages; 1 without a pipeline."""
        return self.pipeline * self.stages_per_rank

    @property
    def rounds(self) -> int:
        """Number of rounds of the pipeline schedule in an optimizer step."""
        return self.micro_batches // self.microbatches_per_round

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh axes, outermost first; the innermost stays inside a node."""
        data = {DP_REPLICATE: self.dp_replicate, DP_SHARD: self.dp_shard}
        outer, inner = (
            {axis.name: self.degrees[axis.name] for axis in some} for some in (OUTER, INNER)
        )
        return {**outer, **data, **inner}

    @property
    def expert_axes(self) -> dict[str, int]:
        """Sizes of the axes of the experts' mesh, outermost first.

        It arranges the same ranks as ``axes``: those inside of ``dp_replicate`` are regrouped, with
        the ranks that share the experts of a layer innermost.
        """
        sizes = self.axes
        inner = math.prod(sizes.pop(name) for name in (DP_SHARD, *(axis.name for axis in INNER)))
        return {**sizes, EXPERT_SHARD: inner // self.expert, EXPERT: self.expert}

    def mesh_sizes(self) -> dict[str, int]:
        """Return the sizes of the axes of the run's mesh, which sums gradients over data axes.

        Axes with the same parameters are merged into a data axis, so that sums of gradients and
        sharding include their ranks.
        """
        sizes = self.axes
        for name in LIKE_DATA:
            sizes[self._merged_into] *= sizes.pop(name)
        return sizes

    def mesh_axes(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the axes of the run's mesh that contain some axes of ``axes``.

        The run's mesh merges axes that are ``LIKE_DATA`` into a data axis.

        Args:
            names: Names of the axes.
        """
        merged = (self._merged_into if name in LIKE_DATA else name for name in names)
        return tuple(dict.fromkeys(merged))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on each axis; the last axis varies fastest."""
        coordinates: dict[str, int] = {}
        for axis, size in reversed(self.axes.items()):
            coordinates[axis] = rank % size
            rank //= size
        return dict(reversed(coordinates.items()))

    def stride(self, axis: str) -> int:
        """Return the difference between the numbers of neighboring ranks along an axis."""
        names = list(self.axes)
        return self.ranks_along(names[names.index(axis) + 1 :])

    def data_shard(self, rank: int) -> int:
        """Return the index of the batch share that a rank processes, below ``data_ranks``."""
        return rank // self.stride(DP_SHARD) % self.data_ranks

    def reports_outputs(self, rank: int) -> bool:
        """Return whether a rank is the first of those that compute the same outputs."""
        coordinates = self.coordinates(rank)
        return not any(coordinates[axis.name] for axis in AXES if axis.same_outputs)

    def random_stream(self, rank: int) -> int:
        """Return a number that is equal for ranks that draw the same random numbers."""
        coordinates, sizes, stream = self.coordinates(rank), self.axes, 0
        for axis in AXES:
            if axis.same_outputs:
                del sizes[axis.name]
        for name, size in sizes.items():
            stream = stream * size + coordinates[name]
        return stream

    def __str__(self) -> str:
        parts, facts = [], self.facts
        if facts.shards_parameters and self.dp_replicate > 1 and self.dp_shard > 1:
            parts.append(f"{self.data_parallel} {self.dp_replicate} x {self.dp_shard}")
        elif self.data_ranks > 1 and facts.averages != "nothing":
            parts.append(f"{self.data_parallel} {self.data_ranks}")
        elif facts.shards_optimizer:
            parts.append(self.data_parallel)  # among the ranks of other axes
        for axis in PRINTED:
            if (degree := self.degrees[axis.name]) > 1:
                schedule = f" ({self.schedule})" if axis.divides == "blocks" else ""
                parts.append(f"{axis.word} {degree}{schedule}")
        if self.expert > 1:
            parts.append(f"expert {self.expert}")
        return " x ".join(parts) or "single"


def num_ranks(config: RunConfig) -> int:
    """Return the number of ranks of a run on its largest number of nodes.

    ``launch.nproc`` must be resolved; ``launch.nnodes`` may be a range.
    """
    assert config.launch.nproc != "auto"
    return config.launch.nproc * nodes(config)[1]


def nodes(config: RunConfig) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes of a run."""
    nnodes = config.launch.nnodes
    if isinstance(nnodes, int):
        return nnodes, nnodes
    least, _, most = nnodes.partition(":")
    return int(least), int(most)


def settings_for_ranks(world_size: int) -> dict[str, int]:
    """Return the settings that give a run ``world_size`` ranks, all on one node."""
    return {"launch.nproc": world_size, "launch.nnodes": 1}


def model_ranks(strategy: StrategyConfig) -> int:
    """Return the number of ranks that process the same samples: the product of all degrees."""
    return math.prod(degrees_of(strategy).values())


def data_parallel_facts(strategy: StrategyConfig) -> DataParallelFacts:
    """Return the properties of the selected data-parallel variant, or of the default."""
    return DATA_PARALLEL.facts(strategy.data_parallel or DEFAULT)


def data_parallel(strategy: StrategyConfig, *, world_size: int) -> str:
    """Return the name of the data-parallel variant.

    ``strategy.data_parallel=null`` selects ``ddp`` if several ranks hold the same parameters, else
    ``none``. Context-parallel ranks hold the same parameters too, and each has only the gradient of
    its positions. So they need ``ddp`` like replicas.
    """
    if strategy.data_parallel is not None:
        return strategy.data_parallel
    degrees = (axis.degree(strategy) for axis in AXES if not axis.sums_gradients)
    holders = world_size // math.prod(degrees)
    return DEFAULT if holders > 1 else NONE


def stages_per_rank(strategy: StrategyConfig) -> int:
    """Return the number of pipeline stages on a rank; 1 without a pipeline."""
    pipeline = strategy.pipeline
    if pipeline.degree == 1:
        return 1
    if pipeline.stages_per_rank == "auto":
        return SCHEDULES[pipeline.schedule].stages_per_rank
    return pipeline.stages_per_rank


def replicas(config: RunConfig, *, world_size: int) -> int:
    """Return the number of full copies of the parameters on the data-parallel ranks."""
    fsdp, ranks = config.strategy.fsdp, max(1, world_size // model_ranks(config.strategy))
    is_sharded = data_parallel_facts(config.strategy).shards_parameters
    if not is_sharded or fsdp.sharding == "no_shard":
        return ranks
    if fsdp.sharding != "hybrid_shard":
        return 1
    return _nodes_of_a_stage(config) if fsdp.replicate == "auto" else fsdp.replicate


def _nodes_of_a_stage(config: RunConfig) -> int:
    """Return the number of nodes that the ranks of one pipeline stage occupy."""
    return max(1, nodes(config)[1] // config.strategy.pipeline.degree)


def frozen_threads(config: RunConfig) -> int:
    """Return the number of threads per rank in a frozen configuration."""
    assert config.launch.threads != "auto"
    return config.launch.threads


def resolved(config: RunConfig, *, accelerators: int) -> RunConfig:
    """Resolve ``launch.nproc``, ``strategy.data_parallel`` and ``strategy.fsdp.replicate``.

    ``launch.nproc=auto`` becomes the product of the degrees if there are no data-parallel ranks
    (``none``), else the number of accelerators. Without accelerators it is 2, or with degrees above
    1 their product, times 2 if ``strategy.data_parallel`` is set.
    """
    nproc, strategy = config.launch.nproc, config.strategy
    if nproc == "auto":
        degrees = model_ranks(strategy)
        if data_parallel_facts(strategy).averages == "nothing":
            nproc = degrees
        elif accelerators or degrees == 1:
            nproc = accelerators or 2
        else:
            nproc = degrees * (2 if strategy.data_parallel else 1)
    least, most = nodes(config)
    kind = data_parallel(strategy, world_size=nproc * most)
    settings = {"launch.nproc": nproc, "strategy.data_parallel": kind}
    fsdp = strategy.fsdp
    if fsdp.sharding == "hybrid_shard" and fsdp.replicate == "auto" and least == most:
        settings["strategy.fsdp.replicate"] = _nodes_of_a_stage(config)
    return with_values(config, settings)


def is_on_cpu(launch: LaunchConfig) -> bool:
    """Return whether the ranks of a run compute on the CPU on any node."""
    if launch.device == "auto":
        return launch.backend in ("gloo", "mock")
    return launch.device == "cpu"


def estimate_device(config: RunConfig) -> Literal["gpu", "gloo", "mock"]:
    """Return the kind of device that a run is estimated for.

    This is its ``hardware``, else the device that it computes on, else a GPU.
    """
    hardware = config.hardware
    if not (is_on_cpu(config.launch) if hardware is None else hardware.is_cpu):
        return "gpu"
    return "mock" if config.launch.backend == "mock" else "gloo"


def with_backend(config: RunConfig, *, accelerators: int) -> RunConfig:
    """Decide ``launch.backend`` and ``launch.device`` once the number of ranks is known.

    auto is nccl if each rank has an accelerator. Ranks that must share accelerators are threads
    (mock), because every layout works with them.
    """
    launch = config.launch
    backend, device = launch.backend, launch.device
    assert launch.nproc != "auto"
    if backend == "auto":
        if device != "cpu" and 0 < launch.nproc <= accelerators:
            backend = "nccl"
        else:
            backend = "mock" if device == "cuda" else "gloo"
    if device == "auto":
        device = "cuda" if backend == "nccl" else "cpu"
    return with_values(config, {"launch.backend": backend, "launch.device": device})


def _micro_batches(config: RunConfig, *, share: int) -> tuple[int, int]:
    """Return the size and the number of micro-batches of a rank."""
    micro = config.train.micro_batch_size
    if micro != "auto":
        size = min(micro, share)
    elif config.strategy.pipeline.degree == 1:
        size = share
    else:
        size = _pipeline_micro_batch(config.strategy, share)
    return size, max(1, share // size)


def _pipeline_micro_batch(strategy: StrategyConfig, share: int) -> int:
    """Return the largest micro-batch with two per stage, else the largest legal one."""
    rule, degree = SCHEDULES[strategy.pipeline.schedule], strategy.pipeline.degree
    stages = stages_per_rank(strategy)
    legal = [
        size
        for size in divisors(share)
        if rule.fits(share // size, degree=degree, stages_per_rank=stages)
    ]
    filled = [size for size in legal if share // size >= 2 * degree * stages]
    return max(filled, default=max(legal, default=1))
