"""Traces the modules of a run's steps: each rank sees its part, and rank 0 writes the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout
from axonlaunch.data.dataset import AnyBatch, Batch
from axonlaunch.diagnostics.module_trace.files import (
    Arithmetic,
    StepTrace,
    TracedTensor,
    write_step,
)
from axonlaunch.engines.base import Engine
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.models.output_shapes import output_shapes
from axonlaunch.training.module_trace.hooks import (
    ModuleHooks,
    Statistics,
    Sums,
    TracedKey,
    in_order_of_computation,
)
from axonlaunch.training.module_trace.whole_tensors import WholeTensors

_LAST = 2**40
"""The place of a module that no rank has called."""
_LOWEST_FIRST: tuple[Arithmetic, ...] = ("bf16", "fp16")
_STAGE = 2**20
"""More calls than a stage has modules."""


class RunTracer:
    """Does forward and backward of a run's steps, and writes those that are traced.

    All ranks know the names of the whole model in one order, so that what they saw is summed as one
    table: the elements of every tensor, their sum and that of their squares.
    """

    def __init__(self, config: RunConfig, engine: Engine, *, world: World, sample: Tensor) -> None:
        """Learn the whole model's names.

        Args:
            config: The run's.
            engine: Built.
            world: Its ranks; all of them have one.
            sample: One sample's inputs, of which shape and type count.
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
        head = spec.head if config.train.loss_chunk is not None else None
        self._traceable = {
            name
            for name in self._modules
            if not name.startswith(compiled or "\0")  # hooks would be compiled too
            and (blocks or not config.train.compile)
            # In its place stands what it will be given, which must not be touched.
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
        self._shapes = self._whole_shapes(model, sample)

    def _whole_shapes(self, model: nn.Module, sample: Tensor) -> dict[TracedKey, tuple[int, ...]]:
        """Return the shapes of all tensors whose elements are written; the model is used up."""
        train = self._config.train
        if train.trace.tensors != "full":
            return {}
        shapes: dict[TracedKey, tuple[int, ...]] = {}
        for name, parameter in model.named_parameters():
            shapes["parameter", name] = shapes["gradient", name] = tuple(parameter.shape)
        for name, output in output_shapes(model, sample).items():
            shapes["output", name] = output.whole(train.global_batch_size)
            shapes["output gradient", name] = shapes["output", name]
        return shapes

    def _batch_shapes(self, batch: AnyBatch) -> dict[TracedKey, tuple[int, ...]]:
        """Return the shapes of a global batch, of which this rank has some rows."""
        if not isinstance(batch, Batch):
            return {}
        size = self._config.train.global_batch_size
        return {
            ("batch", "inputs"): (size, *batch.inputs.shape[1:]),
            ("batch", "targets"): (size, *batch.targets.shape[1:]),
        }

    def backward(self, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Do as ``Engine.backward`` does, and write the step if it is traced."""
        engine = self._engine
        if engine.step not in self._config.train.trace.steps:
            return engine.backward(batch)
        statistics = Statistics()
        whole = None
        if self._shapes:
            shapes = {**self._shapes, **self._batch_shapes(batch)}
            whole = WholeTensors(shapes, self._layout, self._world)
        keep = None if whole is None else whole.add_call
        hooks = ModuleHooks(statistics, samples=self._layout.micro_batch_size, keep=keep)
        if isinstance(batch, Batch):  # others are collated micro-batch by micro-batch
            statistics.add(("batch", "inputs"), batch.inputs)
            statistics.add(("batch", "targets"), batch.targets)
            if whole is not None:
                whole.add_samples(("batch", "inputs"), batch.inputs)
                whole.add_samples(("batch", "targets"), batch.targets)
        for name, parameter in engine.named_parameters():
            statistics.add(("parameter", name), parameter)
            if whole is not None:
                whole.add_parameter(("parameter", name), parameter)
        hooks.watch(self._watched)
        try:
            loss, tokens = engine.backward(batch)
        finally:
            hooks.close()
        statistics.add(("loss", ""), loss)
        for name, updated in engine.named_updated():
            if updated.grad is not None:
                statistics.add(("gradient", name), updated.grad)
                if whole is not None:
                    whole.add_parameter(("gradient", name), updated.grad)
        elements = None if whole is None else whole.gather(self._factors)
        self._write(statistics.sums(), hooks.order, elements)
        return loss, tokens

    def _whole_in(self, stage: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that are whole in a stage.

        Outside of blocks every stage calls what has no parameters, on nothing but in one of them.
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
        known = [sums.get(key, Sums()) for key in self._keys]
        added = torch.tensor(
            [[each.count, each.total, each.squares] for each in known], dtype=torch.float64
        )
        largest = torch.tensor([each.absmax for each in known], dtype=torch.float64)
        places = torch.tensor(self._places(order))
        if self._world.world_size > 1:
            device = self._world.device
            added, largest, places = added.to(device), largest.to(device), places.to(device)
            dist.all_reduce(added)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            dist.all_reduce(places, op=dist.ReduceOp.MIN)
        if not self._world.is_main:
            return
        whole = {
            key: Sums(int(count), total, squares, absmax)
            for key, (count, total, squares), absmax in zip(
                self._keys, added.tolist(), largest.tolist(), strict=True
            )
            if count
        }
        by_place = dict(zip(self._modules, places.tolist(), strict=True))
        trace = StepTrace(
            step=self._engine.step,
            arithmetic=_arithmetic(self._config),
            layout=str(self._layout),
            axes={axis: size for axis, size in self._layout.axes.items() if size > 1},
            tensors=[*self._in_order(whole, sorted(self._modules, key=by_place.__getitem__))],
        )
        write_step(Path(self._config.run_dir), trace, elements)

    def _first_parameters(self) -> dict[str, int]:
        """Return the place in the whole model of the first parameter of each module's stage.

        A later stage of a pipeline holds later parameters.
        """
        place_of = {name: place for place, name in enumerate(self._parameters)}
        stage_of: dict[str, int] = {}
        for stage in self._engine.modules:
            places = (place_of[name] for name, _ in stage.named_parameters() if name in place_of)
            begins = min(places, default=0)
            stage_of.update({name: begins for name, _ in stage.named_modules()})
        return stage_of

    def _places(self, order: dict[str, int]) -> list[int]:
        """Return when each module is computed, where this rank has called it."""
        return [
            self._stage_of.get(name, 0) * _STAGE + order[name] if name in order else _LAST
            for name in self._modules
        ]

    @property
    def _factors(self) -> dict[str, float]:
        """What gradients are multiplied by.

        Engines average them over ranks whose losses are summed, and fp16 scales the loss.
        """
        scale = self._engine.loss_scale
        return {
            "gradient": 1 / scale,
            "output gradient": 1 / (scale * self._layout.gradient_ranks),
        }

    def _in_order(
        self, whole: dict[TracedKey, Sums], modules: Iterable[str]
    ) -> Iterator[TracedTensor]:
        """Yield what was seen in order of computation."""
        factors = self._factors
        for key in in_order_of_computation(modules, self._parameters):
            if key in whole:
                kind, name = key
                size = self._parameters[name] if kind in ("parameter", "gradient") else None
                yield whole[key].to_traced(key, factor=factors.get(kind, 1.0), size=size)


def _all_names(module: nn.Module) -> list[str]:
    """Return the names of parameters, of tied ones all."""
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


def _owners(modules: Iterable[str], parameters: Iterable[str]) -> dict[str, set[str]]:
    """Return the parameters of each module and of what is in it."""
    owned: dict[str, set[str]] = {name: set() for name in modules}
    for parameter in parameters:
        name = parameter
        while name := name.rpartition(".")[0]:
            if name in owned:
                owned[name].add(parameter)
    return owned


def _arithmetic(config: RunConfig) -> Arithmetic:
    """Return the lowest precision in use."""
    train = config.train
    used = {train.precision, train.param_dtype, config.strategy.reduce_dtype}
    return next((dtype for dtype in _LOWEST_FIRST if dtype in used), "fp32")
