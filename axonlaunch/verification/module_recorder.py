"""What the modules of one side give in a step: outputs, and their gradients, by name.

It records, in host memory, and compares nothing. Tensors are kept until the next step, so that a
module that is given one is known to read what another gave.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.models.output_regions import (
    gets_partial_gradients,
    gives_partial_sums,
    pieces_of,
)


@dataclass
class ModuleRecord:
    """A step of some modules.

    Attributes:
        outputs: By a module's name, in order of computation: a tensor for each micro-batch.
        gradients: Of these, in the same places; None where none arrived.
        readers: By a module's name: the innermost ones that are given its output.
        pieces: By a module's name: tensors that lie one behind the other in its last dim.
        partial: Names of modules whose outputs are added up over ranks before they mean anything.
    """

    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[Tensor | None]] = field(default_factory=dict)
    readers: dict[str, list[str]] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)


class ModuleRecorder:
    """Records the named modules of a side, one step after another."""

    def __init__(
        self, modules: Iterable[nn.Module], *, but: Collection[nn.Module | None] = ()
    ) -> None:
        """Hook into modules.

        Args:
            modules: What a rank holds of a model: the whole, or stages.
            but: Those in them whose outputs may not be read.
        """
        self.record = ModuleRecord()
        self._givers: dict[int, tuple[Tensor, list[str]]] = {}
        self._forwards = 0
        for module in modules:
            module.register_forward_pre_hook(self._entering)
            module.register_forward_hook(self._leaving, always_call=True)
            for name, part in module.named_modules():
                if name and part not in but:
                    part.register_forward_pre_hook(self._reading(name), with_kwargs=True)
                    part.register_forward_hook(self._giving(name))

    def begin(self) -> None:
        """Forget the step before."""
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
                        # A module that hands its input on to one inside of it does not read it.
                        readers[:] = [
                            reader for reader in readers if not name.startswith(f"{reader}.")
                        ]
                        readers.append(name)

        return read

    def _giving(self, name: str) -> Any:
        def note(module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = _first_floating(output)
            if tensor is None or not (torch.is_grad_enabled() and module.training):
                return  # shapes are tried out
            record = self.record
            calls = record.outputs.setdefault(name, [])
            # In a forward two micro-batches may well give the same: of their positions, say.
            if not self._forwards and any(torch.equal(tensor.cpu(), before) for before in calls):
                return  # recomputed for a backward
            self._givers.setdefault(id(tensor), (tensor, []))[1].append(name)
            calls.append(tensor.detach().to("cpu", copy=True))
            gradients = record.gradients.setdefault(name, [])
            gradients.append(None)
            record.pieces[name] = pieces_of(module)
            if gives_partial_sums(module):
                record.partial.add(name)
            if tensor.requires_grad and not gets_partial_gradients(module):
                tensor.register_hook(_keeping(gradients, len(gradients) - 1))

        return note


def _keeping(gradients: list[Tensor | None], place: int) -> Any:
    def keep(gradient: Tensor) -> None:
        # A schedule that splits the backward passes here again, for the weights' sake.
        if gradients[place] is None:
            gradients[place] = gradient.detach().to("cpu", copy=True)

    return keep


def _first_floating(outputs: Any) -> Tensor | None:
    """Return the first tensor that a module returns, if it is one of numbers."""
    first = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
    return first if isinstance(first, Tensor) and first.is_floating_point() else None
