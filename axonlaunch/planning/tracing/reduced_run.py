"""What the dry runs of one configuration have in common, and smaller runs that represent it.

It is arithmetic on a model without storage; ``dry_run`` builds engines from it.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from axonlaunch import data
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.config.layout import Layout, num_ranks, of_ranks
from axonlaunch.config.parameter_groups import states_of, with_options
from axonlaunch.config.schedule_rules import SCHEDULES
from axonlaunch.data.dataset import Dataset, holds_documents, sample_inputs, sample_targets
from axonlaunch.data.samples import CollatedSamples
from axonlaunch.engines.pipeline.schedule import PipelineSchedule
from axonlaunch.engines.pipeline.split import stage_blocks
from axonlaunch.engines.tensor.plan_checks import style_modules
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.models.parameter_facts import parameter_facts
from axonlaunch.models.repeated_blocks import with_first_blocks
from axonlaunch.models.spec import ModelSpec
from axonlaunch.planning.tracing import extrapolate_depth
from axonlaunch.preflight.own_data import first_batch

_FEW = 3
"""Micro-batches without a pipeline: the first finds no gradients, the last agrees on them."""
_SHORT = 4
"""Ranks of a short pipeline: the least that has a rank in its midst with three forwards ahead."""
_SETTLED = _SHORT + 2
"""Micro-batches after which those of a short pipeline are all alike."""


@dataclass(frozen=True)
class ReducedRun:
    """What the dry runs of one configuration have in common.

    Attributes:
        config: The run's, with the blocks of each pipeline stage written out.
        layout: Its layout.
        world_size: Ranks.
        model: Whole and undivided, on the meta device.
        sample: Inputs of one sample [...]; values don't matter.
        target: Targets of one sample.
        is_packed: Whether each input has a position in a document.
        structured: A micro-batch of samples of any structure, without bytes; None: they are inputs
            and targets.
        num_blocks: Blocks that are run, the first ones of ``model``.
        repeats: Whether the model can be extrapolated from fewer of its blocks.
    """

    config: RunConfig
    layout: Layout
    world_size: int
    model: nn.Module
    sample: Tensor
    target: Tensor
    is_packed: bool
    structured: CollatedSamples | None
    num_blocks: int
    repeats: bool

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Build the model of a checked configuration and read what a sample is."""
        ranks = num_ranks(config)
        layout = Layout.of(config, world_size=ranks)
        dataset = data.build_dataset(config.data, config.tokenizer)
        model, sample = on_meta(config, seed=config.seed), sample_inputs(dataset)
        if layout.pipeline > 1:
            split = _split(config, layout, model, sample)
            config = with_values(config, {"strategy.pipeline.split": split})
        spec = spec_for(config)
        return cls(
            config,
            layout,
            ranks,
            model,
            sample,
            target=sample_targets(dataset),
            is_packed=holds_documents(dataset),
            structured=_read_structure(dataset, layout),
            num_blocks=len(spec.blocks(model)),
            repeats=spec.repeats(model)
            and _are_divided_alike(config, spec.blocks(model), model)
            and _are_updated_alike(config, spec, model),
        )

    @property
    def counts(self) -> list[int]:
        """Blocks of each pipeline stage."""
        split = self.config.strategy.pipeline.split
        return [self.num_blocks] if self.layout.pipeline == 1 or split == "auto" else split

    def build(self, num_blocks: int | None = None) -> nn.Module:
        """Return a model of as many of the first blocks, or ``num_blocks``, on the meta device."""
        spec, count = spec_for(self.config), num_blocks or self.num_blocks
        if count == len(spec.blocks(self.model)):
            return copy.deepcopy(self.model)
        assert spec.layers is not None
        return with_first_blocks(self.model, spec.layers, count)

    @property
    def schedule(self) -> PipelineSchedule:
        """One round of a pipeline."""
        return PipelineSchedule(
            self.layout.schedule,
            degree=self.layout.pipeline,
            microbatches=self.layout.microbatches_per_round,
            stages_per_rank=self.layout.stages_per_rank,
        )

    def stages_of(self, place: int) -> list[int]:
        """Return the stages of a rank, by its place on the pp axis."""
        return [0] if self.layout.pipeline == 1 else list(self.schedule.stages_of(place))

    def spare_blocks(self, stages: list[int], *, needed: int = extrapolate_depth.SHALLOW) -> int:
        """Return how many blocks can be left out of each of these stages."""
        if not self.repeats:
            return 0
        return max(0, min(self.counts[stage] for stage in stages) - needed)

    def without(self, blocks: int, stages: list[int]) -> Self:
        """Return the same run with fewer blocks in each of these stages, and one in the others."""
        return self._of_blocks(
            [count - blocks if stage in stages else 1 for stage, count in enumerate(self.counts)]
        )

    def reduce(self, place: int) -> tuple[Self, int]:
        """Return the run with the shortest step that shows what a rank of this one does, and where.

        The rank does fewer micro-batches and, if blocks repeat, holds its stages in a shorter
        pipeline. An example: a pipeline of 8 ranks under 1f1b, 32 micro-batches, 2 blocks a stage.
        It is reduced to 4 ranks and 6 micro-batches, where these ranks stand for those of 8:

            rank of 8    0    1 2 3 4 5    6    7
            rank of 4    0    1            2    3

        The rank in question holds its 2 blocks there, all others one. Ranks near the end differ,
        for how many forwards go ahead of the first backward is counted from the last rank.

        Args:
            place: The rank's, on the pp axis.

        Returns:
            The run and the place of a rank like this one on its pp axis.
        """
        layout = self.layout
        if layout.pipeline == 1:
            microbatches = min(_FEW, layout.micro_batches)
            return self._with(degree=1, microbatches=microbatches, rounds=1), 0
        if not self.repeats:
            return self, place
        degree = min(_SHORT, layout.pipeline)
        fits = SCHEDULES[layout.schedule].fits
        # The first rank's forwards may all go ahead of its backwards, or all but one.
        rest = 2 if place else min(2, layout.microbatches_per_round - layout.pipeline)
        microbatches = next(
            n
            for n in itertools.count(degree + rest if rest < 2 else _SETTLED)
            if fits(n, degree=degree, stages_per_rank=layout.stages_per_rank)
        )
        microbatches = min(microbatches, layout.microbatches_per_round)
        short = self._with(degree=degree, microbatches=microbatches, rounds=min(2, layout.rounds))
        short_place = min(place, max(1, degree - layout.pipeline + place))
        counts = [1] * short.layout.num_stages
        for stage, other in zip(self.stages_of(place), short.stages_of(short_place), strict=True):
            counts[other] = self.counts[stage]
        return short._of_blocks(counts), short_place

    def _with(self, *, degree: int, microbatches: int, rounds: int) -> Self:
        """Return the same over a shorter pipeline, in a world to fit, with fewer micro-batches."""
        layout = self.layout
        world_size = self.world_size // layout.pipeline * degree
        samples = layout.micro_batch_size * microbatches * rounds * layout.data_ranks
        settings: dict[str, Any] = {
            "train.micro_batch_size": layout.micro_batch_size,
            "train.global_batch_size": samples,
            **of_ranks(world_size),
        }
        if degree > 1:
            settings |= {
                "strategy.pipeline.degree": degree,
                "strategy.pipeline.microbatches": microbatches,
            }
        config = with_values(self.config, settings)
        layout = Layout.of(config, world_size=world_size)
        return dataclasses.replace(self, config=config, layout=layout, world_size=world_size)

    def _of_blocks(self, counts: list[int]) -> Self:
        """Return the same with the model's first blocks alone, so many in each stage."""
        split = {} if self.layout.pipeline == 1 else {"strategy.pipeline.split": counts}
        config = with_values(self.config, split)
        return dataclasses.replace(self, config=config, num_blocks=sum(counts))


def _read_structure(dataset: Dataset, layout: Layout) -> CollatedSamples | None:
    """Read a micro-batch of samples whose shapes nobody else knows."""
    if dataset.kind != "structured":
        return None
    batch = first_batch(dataset, size=layout.micro_batch_size)
    return batch.map(lambda tensor: torch.empty_like(tensor, device="meta"))


def _are_divided_alike(
    config: RunConfig, blocks: Mapping[str, nn.Module], model: nn.Module
) -> bool:
    """Say whether a user's plan of tensor parallelism, if there is one, takes all blocks alike."""
    tensor = config.strategy.tensor
    if tensor.degree == 1 or not tensor.plan:
        return True
    styles: dict[str, set[Any]] = {name: set() for name in blocks}
    for module in style_modules(model, tensor.plan):
        for block in blocks:
            if module.name == block or module.name.startswith(f"{block}."):
                inside = module.name.removeprefix(block)
                styles[block].add((inside, module.style, module.in_region, module.in_sequence))
    first, *others = styles.values()
    return all(other == first for other in others)


def _are_updated_alike(config: RunConfig, spec: ModelSpec, model: nn.Module) -> bool:
    """Say whether groups of parameters, if there are any, leave all blocks the same states."""
    if not getattr(config.optimizer, "groups", None):
        return True
    blocks = spec.blocks(model)
    states_in: dict[str, set[str]] = {name: set() for name in blocks}
    for name, parameter in parameter_facts(spec, model).items():
        for block in blocks:
            if name.startswith(f"{block}."):
                states = states_of(with_options(config.optimizer, parameter), parameter.shape)
                states_in[block].add(f"{name.removeprefix(block)}: {sorted(states)}")
    first, *others = states_in.values()
    return all(other == first for other in others)


def _split(config: RunConfig, layout: Layout, model: nn.Module, sample: Tensor) -> list[int]:
    """Return the blocks of each pipeline stage.

    Raises:
        ConfigError: The model computes with values, which there are none of.
    """
    try:
        return stage_blocks(config, layout, model, sample=sample)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        message = (
            f"where to cut {type(model).__name__} can't be determined without running it ({reason})"
            "; write the blocks of each stage"
        )
        raise ConfigError([ConfigIssue("strategy.pipeline.split", message, "auto")]) from error
