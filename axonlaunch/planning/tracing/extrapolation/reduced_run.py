"""Computes the inputs of a configuration's dry runs, and smaller runs that represent it.

The model is on the meta device and has no storage. ``dry_run`` builds engines from it.
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
from axonlaunch.config.consistency.layout import Layout, num_ranks, settings_for_ranks
from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.config.optimization.parameter_groups import states_of, with_options
from axonlaunch.config.values.optional_keys import optimizer_groups
from axonlaunch.data.datasets.dataset import Dataset, sample_inputs, sample_targets
from axonlaunch.data.datasets.samples import CollatedSamples
from axonlaunch.engines.pipeline.schedule import PipelineSchedule
from axonlaunch.engines.pipeline.split import stage_blocks
from axonlaunch.engines.tensor.plan_checks import style_modules
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.models.facts.parameter_facts import parameter_facts
from axonlaunch.models.facts.scaled_layers import scaled_layers
from axonlaunch.models.facts.scaled_sizes import ScaledSizes
from axonlaunch.models.modules.repeated_blocks import with_first_blocks, without_first_blocks
from axonlaunch.models.source_of import source_of
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.planning.tracing.extrapolation import extrapolate_depth
from axonlaunch.preflight.custom_data import first_batch

_MICROBATCHES = 3
"""Micro-batches without a pipeline.

The first one finds no gradients, the last one reduces them, and one is in between.
"""
_SHORT_DEGREE = 4
"""Ranks of a short pipeline: the smallest in which an inner rank runs three forwards ahead."""
_STEADY_MICROBATCHES = _SHORT_DEGREE + 2
"""Micro-batches of a short pipeline; further ones would behave like earlier ones."""


@dataclass(frozen=True)
class ReducedRun:
    """Inputs of the dry runs of one configuration.

    Attributes:
        config: Configuration of the run, with explicit numbers of blocks for each pipeline stage.
        layout: Parallel layout of the run.
        world_size: Number of ranks.
        model: The full, undivided model on the meta device.
        sample: Inputs of one sample [...]; their values are not used.
        target: Targets of one sample.
        is_packed: Whether each input has a position in a document.
        structured: One micro-batch on the meta device, for datasets with structured samples. None
            for samples that consist of inputs and targets.
        num_blocks: Number of blocks to run, starting with the first one of ``model``.
        leading: Number of blocks before equal ones, so that fewer blocks can represent the model;
            None if blocks differ in another way.
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
    leading: int | None

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Build the model of a checked configuration and read the shape of its samples."""
        ranks = num_ranks(config)
        layout = Layout.of(config, world_size=ranks)
        dataset = data.build_dataset(config.data, config.tokenizer)
        model, sample = on_meta(config, seed=config.seed), sample_inputs(dataset)
        if layout.pipeline > 1:
            split = _split(config, layout, model, sample)
            config = with_values(config, {"strategy.pipeline.split": split})
        spec = spec_for(config)
        leading = spec.leading_blocks(model)
        if leading is not None:
            equal_blocks = dict([*spec.blocks(model).items()][leading:])
            is_equal = _computes_equally(config, spec, equal_blocks, model)
            if not (is_equal and _updates_blocks_equally(config, spec, equal_blocks, model)):
                leading = None
        return cls(
            config,
            layout,
            ranks,
            model,
            sample,
            target=sample_targets(dataset),
            is_packed=dataset.info.is_packed,
            structured=_read_structure(dataset, layout),
            num_blocks=len(spec.blocks(model)),
            leading=leading,
        )

    @property
    def repeats(self) -> bool:
        """Whether all blocks are equal."""
        return self.leading == 0

    @property
    def counts(self) -> list[int]:
        """Number of blocks of each pipeline stage."""
        split = self.config.strategy.pipeline.split
        return [self.num_blocks] if self.layout.pipeline == 1 or split == "auto" else split

    def build(self, num_blocks: int | None = None) -> nn.Module:
        """Return a model on the meta device with the first ``num_blocks`` blocks.

        None builds the number of blocks of this run.
        """
        spec, count = spec_for(self.config), num_blocks or self.num_blocks
        if count == len(spec.blocks(self.model)):
            return copy.deepcopy(self.model)
        assert spec.layers is not None
        return with_first_blocks(self.model, spec.layers, count)

    def without_first(self, count: int) -> Self:
        """Return this run without the first blocks of its model and of its first stage."""
        if not count:
            return self
        spec = spec_for(self.config)
        assert spec.layers is not None
        first, *others = self.counts
        model = without_first_blocks(self.model, spec.layers, count)
        run = dataclasses.replace(self, model=model, leading=spec.leading_blocks(model))
        return run._with_blocks([first - count, *others])

    @property
    def schedule(self) -> PipelineSchedule:
        """One round of a pipeline."""
        return PipelineSchedule.of(self.layout)

    def stages_of(self, pp_rank: int) -> list[int]:
        """Return the stages of a rank, given its position on the pp axis."""
        return [0] if self.layout.pipeline == 1 else list(self.schedule.stages_of(pp_rank))

    def spare_blocks(self, stages: list[int], *, needed: int = extrapolate_depth.SHALLOW) -> int:
        """Return the number of blocks that can be left out of each of these stages.

        Args:
            stages: Stages of one rank.
            needed: Number of equal blocks that each stage must keep.
        """
        if self.leading is None or (self.leading and self.layout.pipeline > 1):
            return 0
        return max(0, min(self.counts[stage] for stage in stages) - self.leading - needed)

    def without(self, blocks: int, stages: list[int]) -> Self:
        """Return this run with ``blocks`` fewer in each of these stages and one block in others."""
        return self._with_blocks(
            [count - blocks if stage in stages else 1 for stage, count in enumerate(self.counts)]
        )

    def reduce(self, pp_rank: int) -> tuple[Self, int]:
        """Return a run with the shortest step that represents one rank of this run.

        The short run has fewer micro-batches and, if the blocks are equal, fewer pipeline ranks. An
        example: a 1f1b pipeline of 8 ranks with 32 micro-batches and 2 blocks per stage is reduced
        to 4 ranks and 6 micro-batches. Its ranks represent these ranks of the long pipeline:

            long pipeline     0    1 2 3 4 5    6    7
            short pipeline    0    1            2    3

        The represented rank keeps its 2 blocks, all other ranks have one block. Ranks near the end
        are represented separately, because the number of forwards before a rank's first backward
        depends on its distance from the last rank.

        Args:
            pp_rank: Position of the rank on the pp axis.

        Returns:
            The short run, and the position of the representing rank on its pp axis.
        """
        layout = self.layout
        if layout.pipeline == 1:
            microbatches = min(_MICROBATCHES, layout.micro_batches)
            return self._with_pipeline(degree=1, microbatches=microbatches, rounds=1), 0
        if not self.repeats:
            return self, pp_rank
        degree = min(_SHORT_DEGREE, layout.pipeline)
        fits = SCHEDULES[layout.schedule].fits
        # The first rank may run all of its forwards, or all except one, before any backward.
        extra = 2 if pp_rank else min(2, layout.microbatches_per_round - layout.pipeline)
        microbatches = next(
            n
            for n in itertools.count(degree + extra if extra < 2 else _STEADY_MICROBATCHES)
            if fits(n, degree=degree, stages_per_rank=layout.stages_per_rank)
        )
        microbatches = min(microbatches, layout.microbatches_per_round)
        short = self._with_pipeline(
            degree=degree, microbatches=microbatches, rounds=min(2, layout.rounds)
        )
        short_pp_rank = min(pp_rank, max(1, degree - layout.pipeline + pp_rank))
        counts = [1] * short.layout.num_stages
        for stage, short_stage in zip(
            self.stages_of(pp_rank), short.stages_of(short_pp_rank), strict=True
        ):
            counts[short_stage] = self.counts[stage]
        return short._with_blocks(counts), short_pp_rank

    def _with_pipeline(self, *, degree: int, microbatches: int, rounds: int) -> Self:
        """Return this run with other numbers of pipeline ranks, micro-batches and rounds.

        The world size is adapted to the pipeline.
        """
        layout = self.layout
        world_size = self.world_size // layout.pipeline * degree
        samples = layout.micro_batch_size * microbatches * rounds * layout.data_ranks
        settings: dict[str, Any] = {
            "train.micro_batch_size": layout.micro_batch_size,
            "train.global_batch_size": samples,
            **settings_for_ranks(world_size),
        }
        if degree > 1:
            settings |= {
                "strategy.pipeline.degree": degree,
                "strategy.pipeline.microbatches": microbatches,
            }
        config = with_values(self.config, settings)
        layout = Layout.of(config, world_size=world_size)
        return dataclasses.replace(self, config=config, layout=layout, world_size=world_size)

    def _with_blocks(self, counts: list[int]) -> Self:
        """Return this run with only the first ``sum(counts)`` blocks, ``counts[i]`` in stage i."""
        split = {} if self.layout.pipeline == 1 else {"strategy.pipeline.split": counts}
        config = with_values(self.config, split)
        return dataclasses.replace(self, config=config, num_blocks=sum(counts))


def _read_structure(dataset: Dataset, layout: Layout) -> CollatedSamples | None:
    """Return one micro-batch of a dataset with structured samples, on the meta device.

    The samples are read because nothing else knows their shapes. None for other datasets.
    """
    if dataset.kind != "structured":
        return None
    batch = first_batch(dataset, size=layout.micro_batch_size)
    return batch.map(lambda tensor: torch.empty_like(tensor, device="meta"))


def repeated_sizes(config: RunConfig) -> ScaledSizes:
    """Return the sizes of a run's model; ``num_blocks`` is 0 if fewer blocks can't represent all.

    Equal blocks may compute differently because of ``train.matmul_exclude`` or a tensor plan. A
    model with fewer than two periods of blocks is traced itself: ranks may divide the blocks of a
    deeper model in a way that its optimizer forbids.

    Raises:
        ConfigError: The model can't be built.
    """
    sizes = source_of(config).scaled_sizes()
    unrepeated = dataclasses.replace(sizes, num_blocks=0, period=1, leading=0)
    if sizes.num_blocks < sizes.leading + 2 * sizes.period:
        return unrepeated
    if not (config.train.matmul_exclude or config.strategy.tensor.plan):
        return sizes
    spec, model = spec_for(config), on_meta(config, seed=config.seed)
    repeated = [*spec.blocks(model).items()][sizes.leading :]
    for first in range(sizes.period):
        if not _computes_equally(config, spec, dict(repeated[first :: sizes.period]), model):
            return unrepeated
    return sizes


def _computes_equally(
    config: RunConfig, spec: ModelSpec, blocks: Mapping[str, nn.Module], model: nn.Module
) -> bool:
    """Return whether the settings of a run let all of these blocks compute equally."""
    return _divides_blocks_equally(config, blocks, model) and _multiplies_blocks_equally(
        config, spec, blocks, model
    )


def _divides_blocks_equally(
    config: RunConfig, blocks: Mapping[str, nn.Module], model: nn.Module
) -> bool:
    """Return whether the user's tensor-parallel plan, if any, divides all blocks equally."""
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


def _multiplies_blocks_equally(
    config: RunConfig, spec: ModelSpec, blocks: Mapping[str, nn.Module], model: nn.Module
) -> bool:
    """Return whether the same layers of all blocks compute rounded products."""
    if not config.train.matmul_exclude:
        return True
    names = scaled_layers(config, spec, model)
    first, *others = [
        {name.removeprefix(block) for name in names if name.startswith(f"{block}.")}
        for block in blocks
    ]
    return all(other == first for other in others)


def _updates_blocks_equally(
    config: RunConfig, spec: ModelSpec, blocks: Mapping[str, nn.Module], model: nn.Module
) -> bool:
    """Return whether all blocks get the same optimizer states, given any parameter groups."""
    if not optimizer_groups(config.optimizer):
        return True
    states_in: dict[str, set[str]] = {name: set() for name in blocks}
    for name, parameter in parameter_facts(spec, model).items():
        for block in blocks:
            if name.startswith(f"{block}."):
                states = states_of(with_options(config.optimizer, parameter), parameter.shape)
                states_in[block].add(f"{name.removeprefix(block)}: {sorted(states)}")
    first, *others = states_in.values()
    return all(other == first for other in others)


def _split(config: RunConfig, layout: Layout, model: nn.Module, sample: Tensor) -> list[int]:
    """Return the number of blocks of each pipeline stage.

    Raises:
        ConfigError: The model depends on tensor values, so it cannot run on the meta device.
    """
    try:
        return stage_blocks(config, layout, model, sample=sample)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        message = (
            f"where to split {type(model).__name__} can't be determined without running it "
            f"({reason}); write the blocks of each stage"
        )
        raise ConfigError([ConfigIssue("strategy.pipeline.split", message, "auto")]) from error
