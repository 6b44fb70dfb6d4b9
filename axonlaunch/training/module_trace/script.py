"""``ax.trace``: traces the modules of a loop that is not ours, as a run's are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonlaunch.diagnostics.module_trace.files import (
    Arithmetic,
    StepTrace,
    TracedTensor,
    write_step,
)
from axonlaunch.training.module_trace.hooks import (
    ModuleHooks,
    Statistics,
    Sums,
    TracedKey,
    in_order_of_computation,
    on_host,
)

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Parts of a name that ``torch.compile`` and other wrappers add."""
_WHOLE = "module."
"""What ``DataParallel`` begins every name with."""
_ARITHMETIC: dict[torch.dtype, Arithmetic] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class ModelTrace:
    """Writes what a model's modules compute in some steps of a loop; a context manager.

    Steps are counted by ``step``. In others than those that are traced the model has no hooks.
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
        """End a step: call it once an iteration, after ``optimizer.step()``.

        Args:
            loss_scale: What the loss was multiplied by, ``scaler.get_scale()`` before
                ``scaler.update()``; 1 without a ``GradScaler``.

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
        note = self._note_inputs
        self._handles = [self._model.register_forward_pre_hook(note, with_kwargs=True)]
        for name, parameter in self._model.named_parameters():
            self._statistics.add(("parameter", _canonical(name)), parameter)
            if self._is_full:
                self._calls["parameter", _canonical(name)] = {0: on_host(parameter)}
            if parameter.requires_grad:
                hook = self._noting(_canonical(name))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _end(self) -> None:
        if self._handles:
            self._hooks.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _note_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
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

    def _noting(self, name: str) -> Any:
        def note(parameter: Tensor) -> None:
            # What is there now is the sum over micro-batches so far: the last one counts.
            self._gradients[name] = Statistics()
            if parameter.grad is not None:
                self._gradients[name].add(("gradient", name), parameter.grad)
                if self._is_full:
                    self._calls["gradient", name] = {0: on_host(parameter.grad)}

        return note

    def _keep(self, key: TracedKey, tensor: Tensor, *, number: int, **_module: nn.Module) -> None:
        """Keep a call's elements; what is no call's samples, as positions are, is kept once."""
        calls = self._calls.setdefault(key, {})
        if not calls or (tensor.ndim and len(tensor) == self._hooks.samples):
            calls.setdefault(number, on_host(tensor))

    def _elements(self, loss_scale: float) -> dict[TracedKey, Tensor]:
        """Return the elements of all micro-batches, one behind the other.

        A module that a forward calls several times is left out: its calls are in another order
        where there are more micro-batches.
        """
        whole: dict[TracedKey, Tensor] = {}
        for key, calls in self._calls.items():
            if key[0].startswith("output") and self._hooks.calls(key[1]) != self._forwards:
                continue
            parts = [calls[number] for number in sorted(calls)]
            if all(part.shape[1:] == parts[0].shape[1:] for part in parts):
                factor = 1 / loss_scale if key[0].endswith("gradient") else 1.0
                whole[key] = (torch.cat(parts) if len(parts) > 1 else parts[0]) * factor
        return whole

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
            seen = sums.get(key, Sums())
            if seen.count:
                factor = 1 / loss_scale if kind.endswith("gradient") else 1.0
                size = sizes[name] if kind in ("parameter", "gradient") else None
                tensors.append(seen.to_traced(key, factor=factor, size=size))
        low = self._hooks.dtypes & _ARITHMETIC.keys()
        trace = StepTrace(
            step=self._number,
            arithmetic=_ARITHMETIC[low.pop()] if low else "fp32",
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
    """Trace a model in a loop that is not ours, for ``axonlaunch diff RUN FOLDER``.

    Names of modules are made those of the bare model, so that a wrapped one compares with it. The
    gradients are those that backward leaves, before they are clipped. Losses of micro-batches must
    be weighed as those of the run are, by their share of the step's counted targets.

    Args:
        model: What is called in the loop, in training mode and with gradients; on one process.
        folder: Where the steps' files go, in its folder ``module_trace``.
        steps: Steps that are traced, by the updates before them: 0 is the first.
        tensors: norms: statistics of each tensor; full: all its elements too, in fp32.

    Raises:
        ValueError: The loop has several processes, each of which sees a part.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"ax.trace: there are {dist.get_world_size()} processes, of which each sees a part of "
            "the step; run the loop on one, or trace a run of several with train.trace.steps"
        )
    return ModelTrace(model, folder, steps=steps, tensors=tensors)


def _parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules inside of a model, by name, without those that only wrap it."""
    return [(name, part) for name, part in model.named_modules() if _canonical(name)]


def _canonical(name: str) -> str:
    """Return a name without what wrappers add."""
    names = f"{name}.".removeprefix(_WHOLE).rstrip(".").split(".")
    return ".".join(part for part in names if part not in _WRAPPERS)
