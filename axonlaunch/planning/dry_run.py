"""One rank's engine and one step's samples, made without bytes: the real ones in a fake world.

A dry run belongs in a process that is forked for it. It measures nothing by itself.
"""

from __future__ import annotations

import copy
import dataclasses
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from axonlaunch import data
from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout, layout
from axonlaunch.data.dataset import Batch, sample_inputs
from axonlaunch.engines.base import Engine
from axonlaunch.engines.build import Source, build, stage_blocks
from axonlaunch.engines.pipeline_schedule import PipelineSchedule
from axonlaunch.engines.pipeline_split import Part, block_names
from axonlaunch.models.build import construct, refuse_problems, spec_for
from axonlaunch.models.initialization import materialize
from axonlaunch.planning import boundaries, depth, fake_world
from axonlaunch.planning.trace import StorageTrace


@dataclass(frozen=True)
class Blueprint:
    """What the dry runs of one configuration have in common.

    Attributes:
        config: The run's, with the blocks of each pipeline stage written out.
        shares: Its layout.
        world_size: Ranks.
        model: Whole and undivided, on the meta device.
        sample: Inputs of one sample [...]; values don't matter.
        is_text: Whether each input has a target; else each sample has one.
    """

    config: RunConfig
    shares: Layout
    world_size: int
    model: nn.Module
    sample: Tensor
    is_text: bool

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Build the model of a checked configuration and read what a sample is.

        What is to be compiled is not.
        """
        world_size = config.launch.nproc
        assert world_size != "auto"
        config = _with_train(config, compile=False)
        shares = layout(config, world_size=world_size)
        dataset = data.build(config.data)
        model, sample = _on_meta(config.model, seed=config.seed), sample_inputs(dataset)
        if shares.pipeline > 1:
            config = _with_split(config, stage_blocks(config, shares, model, sample=sample))
        return cls(config, shares, world_size, model, sample, is_text=dataset.kind == "tokens")

    @property
    def counts(self) -> list[int]:
        """Blocks of each pipeline stage."""
        split = self.config.strategy.pipeline.split
        if self.shares.pipeline == 1 or split == "auto":
            return [len(spec_for(self.config.model).blocks(self.model))]
        return split

    def stages_of(self, place: int) -> list[int]:
        """Return the stages of a rank, by its place on the pp axis."""
        if self.shares.pipeline == 1:
            return [0]
        schedule = PipelineSchedule(
            self.shares.schedule,
            degree=self.shares.pipeline,
            microbatches=self.shares.round_microbatches,
            stages_per_rank=self.shares.stages_per_rank,
        )
        return list(schedule.stages_of(place))

    def spare_blocks(self, stages: list[int]) -> int:
        """Return how many blocks can be left out of each of these stages."""
        spec = spec_for(self.config.model)
        blocks = spec.blocks(self.model)
        whole = spec.layers is None or not isinstance(
            self.model.get_submodule(spec.layers), nn.ModuleList
        )
        if whole or not depth.repeats(blocks.values()):
            return 0
        return max(0, min(self.counts[stage] for stage in stages) - depth.SHALLOW)

    def without(self, blocks: int, stages: list[int]) -> Self:
        """Return the same with so many blocks fewer in each of these stages, and one in others."""
        counts = [
            count - blocks if stage in stages else 1 for stage, count in enumerate(self.counts)
        ]
        model, layers = copy.deepcopy(self.model), spec_for(self.config.model).layers
        assert layers is not None
        held = model.get_submodule(layers)
        assert isinstance(held, nn.ModuleList)
        del held[sum(counts) :]
        config = self.config if self.shares.pipeline == 1 else _with_split(self.config, counts)
        return dataclasses.replace(self, config=config, model=model)


class DryRun:
    """One rank's engine, in a fake world.

    Attributes:
        engine: The rank's.
    """

    def __init__(
        self, blueprint: Blueprint, world: World, *, trace: StorageTrace | None = None
    ) -> None:
        """Build a rank's engine.

        Args:
            blueprint: What is run.
            world: Where this process stands as the rank.
            trace: Entered wherever storage is allocated; None: nothing follows it.
        """
        self._trace = trace
        self._blueprint = blueprint
        self._mode = fake_world.tensors_without_bytes()
        source = Source(
            construct=self._construct,
            start=self._start,
            storing=self.storing,
            boundaries=self._boundaries,
        )
        self.engine: Engine = build(blueprint.config, world, sample=blueprint.sample, source=source)

    def storing(self) -> AbstractContextManager[Any]:
        """Return the context in which tensors have no bytes and are followed."""
        stack = ExitStack()
        stack.enter_context(self._mode)
        if self._trace is not None:
            stack.enter_context(self._trace)
        return stack

    def batch(self) -> Batch:
        """Return a rank's samples of one step; made inside of ``storing``."""
        shares, sample = self._blueprint.shares, self._blueprint.sample
        samples = shares.micro_batch_size * shares.micro_batches
        inputs = torch.empty((samples, *sample.shape), dtype=sample.dtype)
        shape = inputs.shape if self._blueprint.is_text else inputs.shape[:1]
        return Batch(inputs, torch.empty(shape, dtype=torch.int64))

    def _construct(self, config: Any, *, seed: int) -> nn.Module:
        del config, seed
        return copy.deepcopy(self._blueprint.model)

    def _start(self, module: nn.Module, config: Any, *, seed: int, device: Any) -> None:
        del config, seed
        with nullcontext() if self._trace is None else self._trace.during("parameters"):
            materialize(module, device=device)

    def _boundaries(self, model: nn.Module, stages: Any) -> dict[int, tuple[Tensor, Tensor]]:
        spec, shares = spec_for(self._blueprint.config.model), self._blueprint.shares
        shape = [shares.micro_batch_size, *self._blueprint.sample.shape]
        if shares.context > 1:
            shape[1] //= shares.context
        parts: list[Part] = list(stages)
        with self._mode:
            materialize(model, device="cpu")
            return boundaries.find(
                model,
                blocks=block_names(spec, model),
                stages=parts,
                inputs=torch.empty(shape, dtype=self._blueprint.sample.dtype),
            )


def _with_train(config: RunConfig, **changes: Any) -> RunConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def _with_split(config: RunConfig, counts: list[int]) -> RunConfig:
    pipeline = dataclasses.replace(config.strategy.pipeline, split=counts)
    return dataclasses.replace(
        config, strategy=dataclasses.replace(config.strategy, pipeline=pipeline)
    )


def _on_meta(config: Any, *, seed: int) -> nn.Module:
    """Build a module without storage, also one that would start itself."""
    spec = spec_for(config)
    if spec.initializers is not None:
        return construct(config, seed=seed)
    refuse_problems(config)
    try:
        with torch.device("meta"):
            return spec.build(config)
    except (RuntimeError, NotImplementedError):  # it computes with values while it is built
        module = construct(config, seed=seed)
        materialize(module, device="meta")
        return module
