"""Traces modules in steps of a run: each rank records its part, and rank 0 writes the totals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.data.datasets.dataset import AnyBatch, Batch
from axonlaunch.diagnostics.module_trace.files import (
    StepTrace,
    TracedTensor,
    write_step,
)
from axonlaunch.engines.engine import Engine
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.models.fake.output_shapes import output_shapes
from axonlaunch.training.module_trace.full_tensors import WholeTensors
from axonlaunch.training.module_trace.hooks import (
    ModuleHooks,
    Statistics,
    Sums,
    TracedKey,
    in_order_of_computation,
)

_LAST = 2**40
"""Position of a module that no rank has called."""
_STAGE = 2**20
"""Distance between the positions of two stages; larger than the number of modules in a stage."""


class RunTracer:
    """Runs forward and backward of each step, and writes a trace for selected steps.

    All ranks list the names of the whole model in the same order. Statistics of all ranks can
    therefore be summed as one table: number, sum and sum of squares of the elements of each tensor.
    """

    def __init__(self, config: RunConfig, engine: Engine, *, world: World, sample: Tensor) -> None:
        """Collect the names of the whole model.

        Args:
            config: Configuration of the run.
            engine: Engine of the run.
            world: The ranks; each has a tracer.
            sample: Inputs of one sample; only shape and type matter.
        """
        self._config, self._engine, self._world = config, engine, world
        self._layout = Layout.of(config, world_size=world.world_size)
        model = on_meta(config, seed=config.seed)
        self._parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self._modules = [name for name, _ in model.named_modules() if name]
        self._owners = _owners(self._modules, _all_names(model))
        spec = spec_for(config)
        blocks = spec.blocks(model)
        self._in_blocks = tuple(f"{name}." for name in blocks)
        compiled = self._in_blocks if config.train.compile else ()
        head = spec.head if config.train.defers_head else None
        self._traceable = {
            name
            for name in self._modules
            if not name.startswith(compiled or "\0")  # hooks would be compiled too
            and (blocks or not config.train.compile)
            # A deferred head returns its inputs, which hooks must not change.
            and not (head is not None and f"{head}.".startswith(f"{name}."))
        }
        self._watched = [part for stage in engine.modules for part in self._whole_in(stage)]
        self._stage_of = self._first_parameters()
        self._keys: list[TracedKey] = [
            *(("batch", "inputs"), ("batch", "targets"), ("loss", "")),
            *(("parameter", name) for name in self._parameters),
            *(("gradient", name) for name in self._parameters),
            *(("output", name) for name in self._modules),
            *(("output gradient", name) for name in self._modules),
        ]
        self._shapes = self._full_shapes(model, sample)

    def _full_shapes(self, model: nn.Module, sample: Tensor) -> dict[TracedKey, tuple[int, ...]]:
        """Return the full shapes of all tensors to write with elements. The model is consumed."""
        train = self._config.train
        if train.trace.tensors != "full":
            return {}
        shapes: dict[TracedKey, tuple[int, ...]] = {}
        for name, parameter in model.named_parameters():
            shapes["parameter", name] = shapes["gradient", name] = tuple(parameter.shape)
        for name, output in output_shapes(model, sample).items():
            shapes["output", name] = output.full(train.global_batch_size)
            shapes["output gradient", name] = shapes["output", name]
        return shapes

    def _batch_shapes(self, batch: AnyBatch) -> dict[TracedKey, tuple[int, ...]]:
        """Return the shapes of the global batch."""
        if not isinstance(batch, Batch):
            return {}
        size = self._config.train.global_batch_size
        return {
            ("batch", "inputs"): (size, *batch.inputs.shape[1:]),
            ("batch", "targets"): (size, *batch.targets.shape[1:]),
        }

    def backward(self, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Run ``Engine.backward``, and write a trace if the step is selected."""
        engine = self._engine
        if engine.step not in self._config.train.trace.steps:
            return engine.backward(batch)
        statistics = Statistics()
        full_tensors = None
        if self._shapes:
            shapes = {**self._shapes, **self._batch_shapes(batch)}
            full_tensors = WholeTensors(shapes, self._layout, self._world)
        keep = None if full_tensors is None else full_tensors.add_call
        hooks = ModuleHooks(statistics, samples=self._layout.micro_batch_size, keep=keep)
        if isinstance(batch, Batch):  # structured batches are collated per micro-batch
            statistics.add(("batch", "inputs"), batch.inputs)
            statistics.add(("batch", "targets"), batch.targets)
            if full_tensors is not None:
                full_tensors.add_samples(("batch", "inputs"), batch.inputs)
                full_tensors.add_samples(("batch", "targets"), batch.targets)
        for name, parameter in engine.named_parameters():
            statistics.add(("parameter", name), parameter)
            if full_tensors is not None:
                full_tensors.add_parameter(("parameter", name), parameter)
        hooks.watch(self._watched)
        try:
            loss, tokens = engine.backward(batch)
        finally:
            hooks.close()
        statistics.add(("loss", ""), loss)
        for name, updated in engine.named_updated():
            if updated.grad is not None:
                statistics.add(("gradient", name), updated.grad)
                if full_tensors is not None:
                    full_tensors.add_parameter(("gradient", name), updated.grad)
        elements = None if full_tensors is None else full_tensors.gather(self._factors)
        self._write(statistics.sums(), hooks.order, elements)
        return loss, tokens

    def _whole_in(self, stage: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the traceable modules that a stage contains with all their parameters.

        Modules without parameters outside of blocks are skipped with pipeline stages, because every
        stage calls them, but only one with real data.
        """
        names = {*_all_names(stage)}
        for name, module in stage.named_modules():
            owned = self._owners.get(name, set())
            is_here = bool(owned) or self._layout.pipeline == 1 or name.startswith(self._in_blocks)
            if name in self._traceable and is_here and owned <= names:
                yield name, module

    def _write(
        self,
        sums: dict[TracedKey, Sums],
        order: dict[str, int],
        elements: dict[TracedKey, Tensor] | None,
    ) -> None:
        rows = [sums.get(key, Sums()) for key in self._keys]
        added = torch.tensor(
            [[row.count, row.total, row.squares] for row in rows], dtype=torch.float64
        )
        largest = torch.tensor([row.absmax for row in rows], dtype=torch.float64)
        positions = torch.tensor(self._positions(order))
        if self._world.world_size > 1:
            device = self._world.device
            added, largest, positions = added.to(device), largest.to(device), positions.to(device)
            dist.all_reduce(added)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            dist.all_reduce(positions, op=dist.ReduceOp.MIN)
        if not self._world.is_main:
            return
        totals = {
            key: Sums(int(count), total, squares, absmax)
            for key, (count, total, squares), absmax in zip(
                self._keys, added.tolist(), largest.tolist(), strict=True
            )
            if count
        }
        position_of = dict(zip(self._modules, positions.tolist(), strict=True))
        trace = StepTrace(
            step=self._engine.step,
            arithmetic=precision_of(self._config).lowest.name,
            layout=str(self._layout),
            axes={axis: size for axis, size in self._layout.axes.items() if size > 1},
            tensors=[*self._in_order(totals, sorted(self._modules, key=position_of.__getitem__))],
        )
        write_step(Path(self._config.run_dir), trace, elements)

    def _first_parameters(self) -> dict[str, int]:
        """Return for each module the index of the first parameter of its stage.

        Indices are those in the whole model, so they grow from stage to stage of a pipeline.
        """
        index_of = {name: index for index, name in enumerate(self._parameters)}
        stage_of: dict[str, int] = {}
        for stage in self._engine.modules:
            indices = (index_of[name] for name, _ in stage.named_parameters() if name in index_of)
            first = min(indices, default=0)
            stage_of.update({name: first for name, _ in stage.named_modules()})
        return stage_of

    def _positions(self, order: dict[str, int]) -> list[int]:
        """Return each module's position in order of computation; ``_LAST`` without a call here."""
        return [
            self._stage_of.get(name, 0) * _STAGE + order[name] if name in order else _LAST
            for name in self._modules
        ]

    @property
    def _factors(self) -> dict[str, float]:
        """Factors of gradients by kind, which undo the loss scale and the averaging over ranks."""
        scale = self._engine.loss_scale
        return {
            "gradient": 1 / scale,
            "output gradient": 1 / (scale * self._layout.gradient_ranks),
        }

    def _in_order(
        self, totals: dict[TracedKey, Sums], modules: Iterable[str]
    ) -> Iterator[TracedTensor]:
        """Yield the traced tensors in order of computation."""
        factors = self._factors
        for key in in_order_of_computation(modules, self._parameters):
            if key in totals:
                kind, name = key
                size = self._parameters[name] if kind in ("parameter", "gradient") else None
                yield totals[key].to_traced(key, factor=factors.get(kind, 1.0), size=size)


def _all_names(module: nn.Module) -> list[str]:
    """Return the names of all parameters, including every name of a tied parameter."""
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


def _owners(modules: Iterable[str], parameters: Iterable[str]) -> dict[str, set[str]]:
    """Return the parameters of each module, including those of its submodules."""
    owned: dict[str, set[str]] = {name: set() for name in modules}
    for parameter in parameters:
        name = parameter
        while name := name.rpartition(".")[0]:
            if name in owned:
                owned[name].add(parameter)
    return owned
