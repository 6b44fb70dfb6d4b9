"""Records the outputs of named modules in a step, and the gradients of these outputs.

Copies are kept in host memory. Output tensors are also referenced until the next step, to recognize
a module that takes the output of another module as input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.engines.tensor.parallel_layers.local_parameters import output_pieces
from axonlaunch.models.fake.output_regions import (
    gets_partial_gradients,
    gives_partial_sums,
)


@dataclass
class ModuleRecord:
    """Record of one step. All mappings have names of modules as keys.

    Attributes:
        outputs: One tensor for each micro-batch; keys are in order of computation.
        gradients: Gradients of ``outputs``, in the same order; None for a missing gradient.
        readers: Names of the innermost modules that take the output as input.
        pieces: Number of tensors that are concatenated in the last dimension of the output.
        partial: Names of modules whose outputs are partial sums, to be summed over ranks.
    """

    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[Tensor | None]] = field(default_factory=dict)
    readers: dict[str, list[str]] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)


class ModuleRecorder:
    """Records the named modules of a model, one step after another."""

    def __init__(
        self, modules: Iterable[nn.Module], *, exclude: Collection[nn.Module | None] = ()
    ) -> None:
        """Register hooks.

        Args:
            modules: Models or pipeline stages of a rank.
            exclude: Submodules that are not recorded.
        """
        self.record = ModuleRecord()
        self._givers: dict[int, tuple[Tensor, list[str]]] = {}
        self._forwards = 0
        for module in modules:
            module.register_forward_pre_hook(self._entering)
            module.register_forward_hook(self._leaving, always_call=True)
            for name, part in module.named_modules():
                if name and part not in exclude:
                    part.register_forward_pre_hook(self._reading(name), with_kwargs=True)
                    part.register_forward_hook(self._giving(name))

    def begin(self) -> None:
        """Start a new record."""
        self.record = ModuleRecord()
        self._givers = {}

    def _entering(self, _module: nn.Module, _inputs: Any) -> None:
        self._forwards += 1

    def _leaving(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._forwards -= 1

    def _reading(self, name: str) -> Any:
        def read(_module: nn.Module, inputs: Any, named_inputs: Any) -> None:
            for tensor in (*inputs, *named_inputs.values()):
                for giver in self._givers.get(id(tensor), (tensor, []))[1]:
                    readers = self.record.readers.setdefault(giver, [])
                    if name not in readers:
                        # A module that passes its input to a submodule is not the innermost.
                        readers[:] = [
                            reader for reader in readers if not name.startswith(f"{reader}.")
                        ]
                        readers.append(name)

        return read

    def _giving(self, name: str) -> Any:
        def note(module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = _first_floating(output)
            if tensor is None or not (torch.is_grad_enabled() and module.training):
                return  # for example a forward that only determines shapes
            record = self.record
            calls = record.outputs.setdefault(name, [])
            # Inside a forward two micro-batches may have equal outputs, for example of positions.
            if not self._forwards and any(torch.equal(tensor.cpu(), earlier) for earlier in calls):
                return  # recomputed for a backward
            self._givers.setdefault(id(tensor), (tensor, []))[1].append(name)
            calls.append(tensor.detach().to("cpu", copy=True))
            gradients = record.gradients.setdefault(name, [])
            gradients.append(None)
            record.pieces[name] = output_pieces(module)
            if gives_partial_sums(module):
                record.partial.add(name)
            if tensor.requires_grad and not gets_partial_gradients(module):
                tensor.register_hook(_keeping(gradients, len(gradients) - 1))

        return note


def _keeping(gradients: list[Tensor | None], index: int) -> Any:
    def keep(gradient: Tensor) -> None:
        # Schedules that split the backward call this again for the gradients of weights.
        if gradients[index] is None:
            gradients[index] = gradient.detach().to("cpu", copy=True)

    return keep


def _first_floating(outputs: Any) -> Tensor | None:
    """Return the first output of a module if it is a floating-point tensor."""
    first = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
    return first if isinstance(first, Tensor) and first.is_floating_point() else None
