"""Builds one rank's real engine and the samples of one step on fake tensors, in a fake world.

Use it in a process that is forked for it. The dry run itself measures nothing.
"""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from axonlaunch.comm import World
from axonlaunch.config import with_values
from axonlaunch.data.datasets.dataset import AnyBatch, Batch
from axonlaunch.data.datasets.samples import Samples, default_collate
from axonlaunch.engines.build import Divide, Source, build_engine
from axonlaunch.engines.engine import Engine
from axonlaunch.engines.pipeline.split import Part, block_names
from axonlaunch.models.build import spec_for
from axonlaunch.models.fake import fake_tensor_cache
from axonlaunch.models.tensors.initialization import materialize
from axonlaunch.planning.tracing import fake_world, stage_boundaries
from axonlaunch.planning.tracing.devices import (
    cuda_attention,
    cuda_dropout,
    cuda_norm,
    liger_kernel,
)
from axonlaunch.planning.tracing.extrapolation.extrapolate_chunks import few_chunks
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun
from axonlaunch.planning.tracing.storage_trace import Category, StorageTrace


class FakeRank:
    """One rank's engine in a fake world.

    Attributes:
        engine: Engine of the rank.
        received: Bytes of the receive buffers of one micro-batch, by category. Tensors from other
            ranks count as communication. Tensors from another stage on the same rank need no
            message: its outputs count as activations, its gradients as temporary.
    """

    def __init__(
        self, reduced: ReducedRun, world: World, *, trace: StorageTrace | None = None
    ) -> None:
        """Build the engine of a rank.

        Args:
            reduced: Run to build the engine for.
            world: Fake world that this process has joined as the rank.
            trace: Trace to enter wherever storage is allocated; None traces nothing.
        """
        self._trace = trace
        self._reduced = reduced
        self._stages = reduced.stages_of(reduced.layout.coordinates(world.rank)["pp"])
        self.received: Counter[Category] = Counter()
        self._mode = fake_tensor_cache.fake_tensor_mode()
        # FSDP warns about blocks that return a view; the real run shows this warning.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        for_gpu = cuda_attention.runs_on_gpu(reduced.config)
        if for_gpu:
            cuda_attention.repeat_heads_as_on_cuda()
            cuda_dropout.drop_as_on_cuda()
            if trace is not None:
                cuda_norm.norm_as_on_cuda()
        source = Source(
            construct=self._construct,
            initialize_weights=self._materialize,
            storing=self.storing,
            boundaries=self._boundaries,
            loss_kernel=partial(liger_kernel.fused_cross_entropy_sum, on_gpu=for_gpu),
        )
        config = with_values(reduced.config, {"train.matmul_start_step": 0})  # needs more memory
        if config.train.compile:
            from axonlaunch.planning.tracing.devices import fake_inductor

            fake_inductor.install_fake_inductor(for_gpu=for_gpu)
            # Autotuning needs values, and all kernels allocate the same.
            config = with_values(config, {"train.compile_mode": "default"})
        self.engine: Engine = build_engine(config, world, sample=reduced.sample, source=source)

    def storing(
        self, losses: AbstractContextManager[Any] | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context in which tensors are fake and traced.

        Args:
            losses: Context that shortens losses in chunks; None for ``few_chunks``.
        """
        stack = ExitStack()
        stack.enter_context(self._mode)
        stack.enter_context(few_chunks() if losses is None else losses)
        if self._trace is not None:
            stack.enter_context(self._trace)
        return stack

    def batch(self, micro_batches: int | None = None) -> AnyBatch:
        """Return the rank's samples of a step.

        Call this outside ``storing``, because a data loader creates the samples of a real run. The
        trace follows them once the engine uses them; a context axis uses only its own positions.

        Args:
            micro_batches: Number of micro-batches; None for all of a step.
        """
        layout, sample = self._reduced.layout, self._reduced.sample
        count = micro_batches or layout.micro_batches
        samples, structured = layout.micro_batch_size * count, self._reduced.structured
        with self._mode:
            if structured is not None:
                template = structured.map(lambda tensor: torch.empty_like(tensor, device="cpu"))
                return Samples((None,) * samples, default_collate, parts=(template,) * count)
            inputs = torch.empty((samples, *sample.shape), dtype=sample.dtype)
            target = self._reduced.target
            targets = torch.empty((samples, *target.shape), dtype=target.dtype)
            positions = torch.empty_like(targets) if self._reduced.is_packed else None
            return Batch(inputs, targets, positions)

    def settle(self) -> None:
        """Prepare buffers and optimizer states, as a first step does. Call this in ``storing``."""
        self.prepare_buffers(runs_step=True)
        self.create_states()

    def prepare_buffers(self, *, runs_step: bool) -> None:
        """Leave the buffers of a first step. Call this inside ``storing``.

        Args:
            runs_step: Whether to run forward and backward of one micro-batch for it. In a pipeline,
                whose shortest step is long, parameters are gathered instead in any case.
        """
        if runs_step and self._reduced.layout.pipeline == 1:
            self.engine.backward(self.batch(1))
        else:
            self._gather_once()

    def create_states(self) -> None:
        """Update parameters, with gradients without values if there are none, inside ``storing``.

        The first update creates the optimizer states.
        """
        for _, updated in self.engine.named_updated():
            if updated.grad is None:
                updated.grad = torch.empty_like(updated, dtype=updated.grad_dtype)
        phase = nullcontext() if self._trace is None else self._trace.during("temporary")
        with phase, fake_world.assume_true():
            self.engine.update()

    def _gather_once(self) -> None:
        """Gather and release all parameters once, so that later gathers only resize the buffers.

        If a single rank holds all shards, buffers created during the forward would be counted as
        activations, because no collective marks them as communication.
        """
        modules = [module for root in self.engine.modules for module in root.modules()]
        sharded = [module for module in modules if isinstance(module, FSDPModule)]
        for module in sharded:
            module.unshard()
        for module in sharded:
            module.reshard()

    def _construct(self, config: Any, *, seed: int) -> nn.Module:
        del config, seed
        return self._reduced.build()

    def _materialize(self, module: nn.Module, config: Any, *, seed: int, device: Any) -> None:
        del config, seed
        with nullcontext() if self._trace is None else self._trace.during("parameters"):
            materialize(module, device=device)

    def _boundaries(self, divide: Divide, stages: Any) -> dict[int, tuple[Tensor, Tensor]]:
        spec, layout = spec_for(self._reduced.config), self._reduced.layout
        model = self._reduced.build(1 if self._reduced.repeats else None)
        divide(model)
        shape = [layout.micro_batch_size, *self._reduced.sample.shape]
        if layout.divides_sequences:
            shape[1] //= layout.divisor("sequences")
        all_stages: list[Part] = list(stages)
        with self._mode:
            materialize(model, device="cpu")
            boundaries = stage_boundaries.find(
                model,
                blocks=block_names(spec, model),
                stages=all_stages,
                inputs=torch.empty(shape, dtype=self._reduced.sample.dtype),
                takes_first=spec.flow is not None,
            )
        for stage in all_stages:
            stage_input, stage_output = boundaries[stage.index]
            if stage.index in self._stages:
                previous_is_local, next_is_local = (
                    index in self._stages for index in (stage.index - 1, stage.index + 1)
                )
                if not stage.is_first:
                    self.received["activations" if previous_is_local else "communication"] += (
                        stage_input.nbytes
                    )
                if not stage.is_last:
                    self.received["temporary" if next_is_local else "communication"] += (
                        stage_output.nbytes
                    )
        return boundaries
