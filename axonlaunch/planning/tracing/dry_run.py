"""One rank's engine and one step's samples, made of fake tensors: the real ones in a fake world.

A dry run belongs in a process that is forked for it. It measures nothing by itself.
"""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from axonlaunch.comm import World
from axonlaunch.config import with_values
from axonlaunch.data.dataset import AnyBatch, Batch
from axonlaunch.data.samples import Samples, default_collate
from axonlaunch.engines.base import Engine
from axonlaunch.engines.build import Divide, Source, build_engine
from axonlaunch.engines.pipeline.split import Part, block_names
from axonlaunch.models import fake_tensor_cache
from axonlaunch.models.build import spec_for
from axonlaunch.models.initialization import materialize
from axonlaunch.planning.tracing import cuda_attention, cuda_norm, fake_world, stage_boundaries
from axonlaunch.planning.tracing.reduced_run import ReducedRun
from axonlaunch.planning.tracing.storage_trace import Category, StorageTrace


class FakeRank:
    """One rank's engine, in a fake world.

    Attributes:
        engine: The rank's.
        received: Bytes of one micro-batch's buffers for what other stages give, by category: the
            rank's own stages hand outputs and gradients on without a message.
    """

    def __init__(
        self, reduced: ReducedRun, world: World, *, trace: StorageTrace | None = None
    ) -> None:
        """Build a rank's engine.

        Args:
            reduced: What is run.
            world: Where this process stands as the rank.
            trace: Entered wherever storage is allocated; None: nothing follows it.
        """
        self._trace = trace
        self._reduced = reduced
        self._stages = reduced.stages_of(world.rank * reduced.layout.pipeline // reduced.world_size)
        self.received: Counter[Category] = Counter()
        self._mode = fake_tensor_cache.fake_tensor_mode()
        # A block that returns a view, which a model may change in place: a run of it says so once.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        for_gpu = cuda_attention.runs_on_gpu(reduced.config)
        if for_gpu:
            cuda_attention.repeat_heads_as_on_cuda()
            if trace is not None:
                cuda_norm.norm_as_on_cuda()
        source = Source(
            construct=self._construct,
            initialize_weights=self._start,
            storing=self.storing,
            boundaries=self._boundaries,
        )
        config = reduced.config
        if config.train.compile:
            from axonlaunch.planning.tracing import fake_inductor

            fake_inductor.install_fake_inductor(for_gpu=for_gpu)
            # Without values no kernel can be measured; any of them allocates the same.
            config = with_values(config, {"train.compile_mode": "default"})
        self.engine: Engine = build_engine(config, world, sample=reduced.sample, source=source)

    def storing(self) -> AbstractContextManager[Any]:
        """Return the context in which tensors are fake and are followed."""
        stack = ExitStack()
        stack.enter_context(self._mode)
        if self._trace is not None:
            stack.enter_context(self._trace)
        return stack

    def batch(self, micro_batches: int | None = None) -> AnyBatch:
        """Return a rank's samples of a step; made outside of ``storing``, as a loader makes them.

        What an engine takes of them is followed from then on: of a context axis its own positions.

        Args:
            micro_batches: How many; None: all of a step.
        """
        layout, sample = self._reduced.layout, self._reduced.sample
        count = micro_batches or layout.micro_batches
        samples, structured = layout.micro_batch_size * count, self._reduced.structured
        with self._mode:
            if structured is not None:
                part = structured.map(lambda tensor: torch.empty_like(tensor, device="cpu"))
                return Samples((None,) * samples, default_collate, parts=(part,) * count)
            inputs = torch.empty((samples, *sample.shape), dtype=sample.dtype)
            target = self._reduced.target
            targets = torch.empty((samples, *target.shape), dtype=target.dtype)
            positions = torch.empty_like(targets) if self._reduced.is_packed else None
            return Batch(inputs, targets, positions)

    def settle(self) -> None:
        """Let the optimizer make its states, as a first step does; inside of ``storing``.

        Without a pipeline it is a step of one micro-batch. A pipeline's least step is long, so that
        there gradients come from nowhere.
        """
        if self._reduced.layout.pipeline == 1:
            self.engine.backward(self.batch(1))
        else:
            self._gather_once()
        for _, updated in self.engine.named_updated():
            if updated.grad is None:
                updated.grad = torch.empty_like(updated)
        phase = nullcontext() if self._trace is None else self._trace.during("temporary")
        with phase, fake_world.assume_true():
            self.engine.update()

    def _gather_once(self) -> None:
        """Gather all parameters and let them go: one rank's buffers are resized from then on.

        What is made the first time is an activation by its looks, where no rank has a share of it.
        """
        parts = [part for module in self.engine.modules for part in module.modules()]
        sharded = [part for part in parts if isinstance(part, FSDPModule)]
        for part in sharded:
            part.unshard()
        for part in sharded:
            part.reshard()

    def _construct(self, config: Any, *, seed: int) -> nn.Module:
        del config, seed
        return self._reduced.build()

    def _start(self, module: nn.Module, config: Any, *, seed: int, device: Any) -> None:
        del config, seed
        with nullcontext() if self._trace is None else self._trace.during("parameters"):
            materialize(module, device=device)

    def _boundaries(self, divide: Divide, stages: Any) -> dict[int, tuple[Tensor, Tensor]]:
        spec, layout = spec_for(self._reduced.config), self._reduced.layout
        model = self._reduced.build(1 if self._reduced.repeats else None)
        divide(model)
        shape = [layout.micro_batch_size, *self._reduced.sample.shape]
        if layout.context > 1:
            shape[1] //= layout.context
        segments: list[Part] = list(stages)
        with self._mode:
            materialize(model, device="cpu")
            ends = stage_boundaries.find(
                model,
                blocks=block_names(spec, model),
                stages=segments,
                inputs=torch.empty(shape, dtype=self._reduced.sample.dtype),
                takes_first=spec.flow is not None,
            )
        for part in segments:
            takes, gives = ends[part.index]
            if part.index in self._stages:
                below, above = (index in self._stages for index in (part.index - 1, part.index + 1))
                if not part.is_first:
                    self.received["activations" if below else "communication"] += takes.nbytes
                if not part.is_last:
                    self.received["temporary" if above else "communication"] += gives.nbytes
        return ends
