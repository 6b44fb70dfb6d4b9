"""Implements ``ax.trace``, which traces modules in a user's training loop in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonlaunch.config.precision import lowest_format
from axonlaunch.diagnostics.module_trace.files import (
    StepTrace,
    TracedTensor,
    write_step,
)
from axonlaunch.models.torch_dtypes import FORMAT_OF_DTYPE
from axonlaunch.training.module_trace.hooks import (
    ModuleHooks,
    Statistics,
    Sums,
    TracedKey,
    in_order_of_computation,
    on_host,
)

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Name components that ``torch.compile`` and other wrappers add."""
_WHOLE = "module."
"""Prefix that ``DataParallel`` adds to every name."""


class ModelTrace:
    """Context manager that traces a model's modules in selected steps of a training loop.

    ``step`` counts the steps. The model has hooks only during selected steps.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path,
        *,
        steps: Sequence[int],
        tensors: Literal["norms", "full"],
    ) -> None:
        self._model, self._folder, self._steps = model, Path(folder), frozenset(steps)
        self._is_full = tensors == "full"
        self._number = 0
        self._handles: list[Any] = []
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def step(self, *, loss_scale: float = 1.0) -> None:
        """End a step. Call this once per iteration, after ``optimizer.step()``.

        Args:
            loss_scale: Factor of the loss: ``scaler.get_scale()`` before ``scaler.update()``, or 1
                without a ``GradScaler``.

        Raises:
            OSError: The step's file can't be written.
        """
        if self._number in self._steps:
            self._write(loss_scale)
            self._end()
        self._number += 1
        self._begin()

    def _begin(self) -> None:
        if self._number not in self._steps:
            return
        self._statistics = Statistics()
        self._gradients: dict[str, Statistics] = {}
        self._calls: dict[TracedKey, dict[int, Tensor]] = {}
        self._forwards = 0
        keep = self._keep if self._is_full else None
        self._hooks = ModuleHooks(self._statistics, samples=0, keep=keep)
        self._hooks.watch((_canonical(name), part) for name, part in _parts(self._model))
        hook = self._record_inputs
        self._handles = [self._model.register_forward_pre_hook(hook, with_kwargs=True)]
        for name, parameter in self._model.named_parameters():
            self._statistics.add(("parameter", _canonical(name)), parameter)
            if self._is_full:
                self._calls["parameter", _canonical(name)] = {0: on_host(parameter)}
            if parameter.requires_grad:
                gradient_hook = self._gradient_hook(_canonical(name))
                self._handles.append(parameter.register_post_accumulate_grad_hook(gradient_hook))

    def _end(self) -> None:
        if self._handles:
            self._hooks.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _record_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = [
            argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)
        ]
        if not (module.training and torch.is_grad_enabled() and inputs):
            return
        self._forwards += 1
        self._hooks.samples = len(inputs[0]) if inputs[0].ndim else 0
        self._statistics.add(("batch", "inputs"), inputs[0])
        if self._is_full:
            self._calls.setdefault(("batch", "inputs"), {})[self._forwards] = on_host(inputs[0])

    def _gradient_hook(self, name: str) -> Any:
        def record(parameter: Tensor) -> None:
            # The gradient is a sum over micro-batches so far, so the last call replaces the others.
            self._gradients[name] = Statistics()
            if parameter.grad is not None:
                self._gradients[name].add(("gradient", name), parameter.grad)
                if self._is_full:
                    self._calls["gradient", name] = {0: on_host(parameter.grad)}

        return record

    def _keep(self, key: TracedKey, tensor: Tensor, *, number: int, **_module: nn.Module) -> None:
        """Keep the elements of a call. Tensors not of one row per sample are kept only once."""
        calls = self._calls.setdefault(key, {})
        if not calls or (tensor.ndim and len(tensor) == self._hooks.samples):
            calls.setdefault(number, on_host(tensor))

    def _elements(self, loss_scale: float) -> dict[TracedKey, Tensor]:
        """Return the elements of all micro-batches, concatenated.

        Modules that a forward calls several times are omitted, because the order of their calls
        depends on the number of micro-batches.
        """
        full: dict[TracedKey, Tensor] = {}
        for key, calls in self._calls.items():
            if key[0].startswith("output") and self._hooks.calls(key[1]) != self._forwards:
                continue
            parts = [calls[number] for number in sorted(calls)]
            if all(part.shape[1:] == parts[0].shape[1:] for part in parts):
                factor = 1 / loss_scale if key[0].endswith("gradient") else 1.0
                full[key] = (torch.cat(parts) if len(parts) > 1 else parts[0]) * factor
        return full

    def _write(self, loss_scale: float) -> None:
        sums = self._statistics.sums()
        for statistics in self._gradients.values():
            sums.update(statistics.sums())
        sizes = {
            _canonical(name): parameter.numel()
            for name, parameter in self._model.named_parameters()
        }
        tensors: list[TracedTensor] = []
        for key in in_order_of_computation(self._hooks.order, sizes):
            kind, name = key
            total = sums.get(key, Sums())
            if total.count:
                factor = 1 / loss_scale if kind.endswith("gradient") else 1.0
                size = sizes[name] if kind in ("parameter", "gradient") else None
                tensors.append(total.to_traced(key, factor=factor, size=size))
        format_dtypes = self._hooks.dtypes & FORMAT_OF_DTYPE.keys()
        trace = StepTrace(
            step=self._number,
            arithmetic=lowest_format(FORMAT_OF_DTYPE[dtype] for dtype in format_dtypes).name,
            layout="a loop of its own",
            tensors=tensors,
        )
        write_step(self._folder, trace, self._elements(loss_scale) if self._is_full else None)


def trace(
    model: nn.Module,
    folder: str | Path,
    *,
    steps: Sequence[int] = (0,),
    tensors: Literal["norms", "full"] = "norms",
) -> ModelTrace:
    """Trace a model in a custom training loop, for ``axonlaunch diff RUN FOLDER``.

    Module names are those of the model without wrappers, so that a wrapped model can be compared.
    Gradients are recorded after backward, before clipping. The losses of micro-batches must be
    weighted as in a run: by their fraction of the step's counted targets.

    Args:
        model: Model that the loop calls in training mode with gradients, in a single process.
        folder: Folder for the trace; its folder ``module_trace`` receives a file for each step.
        steps: Steps to trace, as the number of updates before them: 0 is the first step.
        tensors: ``norms`` for statistics of each tensor; ``full`` also for all elements, in fp32.

    Raises:
        ValueError: The loop has several processes, each with a part of the step.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"ax.trace: there are {dist.get_world_size()} processes, and each sees only a part of "
            "the step; run the loop on one, or trace a run on several with train.trace.steps"
        )
    return ModelTrace(model, folder, steps=steps, tensors=tensors)


def _parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the submodules of a model by name, without wrappers."""
    return [(name, part) for name, part in model.named_modules() if _canonical(name)]


def _canonical(name: str) -> str:
    """Return a name without the prefix and the components that wrappers add."""
    names = f"{name}.".removeprefix(_WHOLE).rstrip(".").split(".")
    return ".".join(part for part in names if part not in _WRAPPERS)
