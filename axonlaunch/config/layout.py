"""What a configuration means for a world of a given size: how many of what.

Pure arithmetic on the typed tree; it starts nothing and refuses nothing (``rules`` does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from axonlaunch.config.data_parallel import DATA_PARALLEL, DEFAULT, NONE, DataParallelFacts
from axonlaunch.config.errors import divisors
from axonlaunch.config.launch import LaunchConfig
from axonlaunch.config.plain import with_values
from axonlaunch.config.schedule_rules import SCHEDULES
from axonlaunch.config.schema import RunConfig, StrategyConfig


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the mesh axes and of a rank's share of a step.

    Attributes:
        data_parallel: The variant's name, ``null`` resolved.
        pipeline: Ranks that layers are divided among.
        dp_replicate: Ranks that hold the same shard.
        dp_shard: Ranks that one copy of the parameters is divided among.
        context: Ranks that each sequence is divided among.
        tensor: Ranks that each layer is divided among.
        schedule: The pipeline's.
        stages_per_rank: Stages of the pipeline on each rank.
        micro_batch_size: Samples per forward on one rank.
        micro_batches: Forwards per optimizer step on one rank (gradient accumulation).
        microbatches_per_round: Micro-batches of one round of the pipeline's schedule.
    """

    data_parallel: str
    pipeline: int
    dp_replicate: int
    dp_shard: int
    context: int
    tensor: int
    schedule: str
    stages_per_rank: int
    micro_batch_size: int
    micro_batches: int
    microbatches_per_round: int

    @classmethod
    def of(cls, config: RunConfig, *, world_size: int) -> Self:
        """Lay a run out over a world; sizes are rounded down where they don't divide."""
        strategy = config.strategy
        ranks = max(1, world_size // model_ranks(strategy))
        replicate = replicas(config, world_size=world_size)
        size, count = _micro_batches(config, share=max(1, config.train.global_batch_size // ranks))
        in_round = strategy.pipeline.microbatches
        return cls(
            data_parallel=data_parallel(strategy, world_size=world_size),
            pipeline=strategy.pipeline.degree,
            dp_replicate=replicate,
            dp_shard=max(1, ranks // replicate),
            context=strategy.context.degree,
            tensor=strategy.tensor.degree,
            schedule=strategy.pipeline.schedule,
            stages_per_rank=stages_per_rank(strategy),
            micro_batch_size=size,
            micro_batches=count,
            microbatches_per_round=count if in_round == "auto" else min(in_round, count),
        )

    @property
    def facts(self) -> DataParallelFacts:
        """Properties of the data-parallel variant."""
        return DATA_PARALLEL.facts(self.data_parallel)

    @property
    def parameter_shards(self) -> int:
        """Ranks that each parameter is divided among, beside those of other axes."""
        return self._shards() if self.facts.shards_parameters else 1

    @property
    def gradient_shards(self) -> int:
        """The same of each gradient, once a step's last backward has passed it.

        Before that whole ones add up, where a step has several backwards, or travel, where ranks
        that share a sequence wait for none in a backward.
        """
        has_one_backward = self.micro_batches == 1 and self.pipeline == 1
        leaves_parts = self.facts.divides_update and has_one_backward and self.context == 1
        return self._shards() if self.facts.shards_gradients or leaves_parts else 1

    @property
    def optimizer_shards(self) -> int:
        """The same of each optimizer state."""
        return self._shards() if self.facts.shards_optimizer else 1

    def _shards(self) -> int:
        if not self.facts.shards_parameters:
            return self.gradient_ranks
        return self.dp_shard if self.replicates_context else self.dp_shard * self.context

    @property
    def replicates_context(self) -> bool:
        """Whether ranks that share a sequence hold whole parameters, as replicas do."""
        return not self.facts.shards_parameters or self.dp_replicate == self.data_ranks > 1

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def gradient_ranks(self) -> int:
        """Ranks whose gradients of one parameter are different parts of one sum."""
        return self.data_ranks * self.context

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline; 1 without one."""
        return self.pipeline * self.stages_per_rank

    @property
    def rounds(self) -> int:
        """Rounds of the pipeline's schedule in an optimizer step."""
        return self.micro_batches // self.microbatches_per_round

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh axes, outermost first; the innermost stays inside a node."""
        return {
            "pp": self.pipeline,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.context,
            "tp": self.tensor,
        }

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where a rank stands on each axis, the last the fastest."""
        places: dict[str, int] = {}
        for axis, size in reversed(self.axes.items()):
            places[axis] = rank % size
            rank //= size
        return dict(reversed(places.items()))

    def data_shard(self, rank: int) -> int:
        """Return which of the ``data_ranks`` shares of a batch a rank works on."""
        return rank // (self.context * self.tensor) % self.data_ranks

    def __str__(self) -> str:
        axes, facts = [], self.facts
        if facts.shards_parameters and self.dp_replicate > 1 and self.dp_shard > 1:
            axes.append(f"{self.data_parallel} {self.dp_replicate} x {self.dp_shard}")
        elif not facts.shards_optimizer and self.data_ranks == 1 < self.context:
            pass  # the replicas are the context ranks, which stand below
        elif facts.averages != "nothing":
            axes.append(f"{self.data_parallel} {self.data_ranks}")
        if self.context > 1:
            axes.append(f"context {self.context}")
        if self.tensor > 1:
            axes.append(f"tensor {self.tensor}")
        if self.pipeline > 1:
            axes.append(f"pipeline {self.pipeline} ({self.schedule})")
        return " x ".join(axes) or "single"


def num_ranks(config: RunConfig) -> int:
    """Return the ranks of a run whose ``launch.nproc`` is resolved, on as many nodes as it may.

    ``launch.nnodes`` is a number or two.
    """
    assert config.launch.nproc != "auto"
    return config.launch.nproc * nodes(config)[1]


def nodes(config: RunConfig) -> tuple[int, int]:
    """Return the fewest and the most nodes of a run."""
    nnodes = config.launch.nnodes
    if isinstance(nnodes, int):
        return nnodes, nnodes
    least, _, most = nnodes.partition(":")
    return int(least), int(most)


def of_ranks(world_size: int) -> dict[str, int]:
    """Return the settings that give a run a world of that size, wherever its ranks are."""
    return {"launch.nproc": world_size, "launch.nnodes": 1}


def model_ranks(strategy: StrategyConfig) -> int:
    """Return how many ranks work on the same samples: all degrees but the data's."""
    return strategy.pipeline.degree * strategy.context.degree * strategy.tensor.degree


def data_parallel_facts(strategy: StrategyConfig) -> DataParallelFacts:
    """Return the properties of the variant that is chosen, or of the default."""
    return DATA_PARALLEL.facts(strategy.data_parallel or DEFAULT)


def data_parallel(strategy: StrategyConfig, *, world_size: int) -> str:
    """Return what keeps the ranks in step that hold the same parameters; nothing else decides it.

    Where ``strategy.data_parallel`` is null that is ddp, or none if no two ranks hold the same.
    Ranks that share a sequence (``strategy.context``) hold the same parameters, and each has the
    gradient of its own positions alone: context 2 on 2 ranks needs ddp as much as 2 replicas do.
    """
    if strategy.data_parallel is not None:
        return strategy.data_parallel
    holders = world_size // (strategy.pipeline.degree * strategy.tensor.degree)
    return DEFAULT if holders > 1 else NONE


def stages_per_rank(strategy: StrategyConfig) -> int:
    """Return how many stages of the pipeline a rank holds; 1 without a pipeline."""
    pipeline = strategy.pipeline
    if pipeline.degree == 1:
        return 1
    if pipeline.stages_per_rank == "auto":
        return SCHEDULES[pipeline.schedule].stages_per_rank
    return pipeline.stages_per_rank


def replicas(config: RunConfig, *, world_size: int) -> int:
    """Return how many whole copies of the parameters the data-parallel ranks hold."""
    fsdp, ranks = config.strategy.fsdp, max(1, world_size // model_ranks(config.strategy))
    is_sharded = data_parallel_facts(config.strategy).shards_parameters
    if not is_sharded or fsdp.sharding == "no_shard":
        return ranks
    if fsdp.sharding != "hybrid_shard":
        return 1
    return _nodes_of_a_stage(config) if fsdp.replicate == "auto" else fsdp.replicate


def _nodes_of_a_stage(config: RunConfig) -> int:
    """Return how many nodes the data-parallel ranks of a pipeline's stage are on."""
    return max(1, nodes(config)[1] // config.strategy.pipeline.degree)


def frozen_threads(config: RunConfig) -> int:
    """Return with how many threads each rank of a run computes whose configuration is frozen."""
    assert config.launch.threads != "auto"
    return config.launch.threads


def resolved(config: RunConfig, *, accelerators: int) -> RunConfig:
    """Decide what was left to the node: the number of ranks, and by it the strategy.

    ``launch.nproc=auto`` is one rank for one device, else one an accelerator. Without any it is 2,
    or what the strategy's degrees need: as many, and twice as many for a data-parallel kind.
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
    """Return whether a run says that its ranks compute on the CPU, on whichever node."""
    if launch.device == "auto":
        return launch.backend in ("gloo", "mock")
    return launch.device == "cpu"


def estimated_on(config: RunConfig) -> Literal["gpu", "gloo", "mock"]:
    """Return what a run is estimated for: the hardware that it names, or what it computes on.

    A run that leaves it to the node is estimated for a GPU.
    """
    hardware = config.hardware
    if not (is_on_cpu(config.launch) if hardware is None else hardware.is_cpu):
        return "gpu"
    return "mock" if config.launch.backend == "mock" else "gloo"


def with_backend(config: RunConfig, *, accelerators: int) -> RunConfig:
    """Decide ``launch.backend`` and ``launch.device`` once the number of ranks is known.

    nccl with a device each; ranks that are to share one are threads, of which each layout works.
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
    """Return the size and the number of a rank's micro-batches."""
    micro = config.train.micro_batch_size
    if micro != "auto":
        size = min(micro, share)
    elif config.strategy.pipeline.degree == 1:
        size = share
    else:
        size = _pipeline_micro_batch(config.strategy, share)
    return size, max(1, share // size)


def _pipeline_micro_batch(strategy: StrategyConfig, share: int) -> int:
    """Choose the largest micro-batch that gives two a stage, or as many as the schedule needs."""
    rule, degree = SCHEDULES[strategy.pipeline.schedule], strategy.pipeline.degree
    stages = stages_per_rank(strategy)
    legal = [
        size
        for size in divisors(share)
        if rule.fits(share // size, degree=degree, stages_per_rank=stages)
    ]
    filled = [size for size in legal if share // size >= 2 * degree * stages]
    return max(filled, default=max(legal, default=1))
