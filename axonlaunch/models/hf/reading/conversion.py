"""Maps model parameters to the tensors of a checkpoint, and back.

transformers renames tensors and packs experts when it loads a checkpoint, and undoes both when it
saves one. Its conversion code is run with ``OriginTensor`` instead of tensors, or on the tensors if
it computes with them.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.models.hf.reading import library
from axonlaunch.models.tensors.saved_tensors import Computed, SavedTensors
from axonlaunch.models.tensors.tensor_origins import CannotPlaceError, OriginTensor


@dataclass
class _ConverterInputs:
    """Inputs of one of transformers' converters.

    Attributes:
        converter: The converter, or None if a single tensor is used unchanged.
        sources: Tensor names by the pattern that they match, in order.
    """

    converter: Any
    sources: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def conversion(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> SavedTensors:
    """Find a model's parameters among a checkpoint's tensors, as ``from_pretrained`` does.

    Args:
        model: Model of transformers, without storage.
        shapes: Shapes of the checkpoint's tensors by name.
    """
    model_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model_names |= {name for name, _ in model.named_buffers()}
    collected: dict[str, _ConverterInputs] = {}
    unexpected = []
    for source, target, pattern, converter in library.targets(model, list(shapes)):
        if target not in model_names:
            unexpected.append(source)
            continue
        entry = collected.setdefault(target, _ConverterInputs(converter))
        entry.sources[pattern or source].append(source)
    parameters: dict[str, OriginTensor | Computed] = {}
    for target, entry in collected.items():
        parameters |= _find_sources(model, target, entry, shapes)
    ignored = library.ignored_patterns(model)
    not_ignored = [
        name
        for name in unexpected
        if not any(re.search(expression, name) for expression in ignored)
    ]
    return SavedTensors(_by_first_name(model, parameters), tuple(not_ignored))


def as_saved(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, blocks: str | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters as ``save_pretrained`` writes them, block by block.

    Args:
        model: Model of transformers, without storage.
        tensors: Names and values of its parameters; those of a block must be consecutive.
        blocks: Path of the list of blocks, which are converted separately. None converts all
            parameters together.
    """

    def block(item: tuple[str, Tensor]) -> str:
        prefix = f"{blocks}."
        return item[0].removeprefix(prefix).split(".")[0] if item[0].startswith(prefix) else ""

    for _, group in groupby(tensors, key=block):
        yield from library.revert_conversion(model, dict(group)).items()


def _find_sources(
    model: nn.Module, target: str, entry: _ConverterInputs, shapes: Mapping[str, Sequence[int]]
) -> dict[str, OriginTensor | Computed]:
    if entry.converter is None:
        [[source, *_]] = entry.sources.values()
        return {target: OriginTensor.full(source, shapes[source])}

    def convert(values: Mapping[str, Any]) -> dict[str, Any]:
        converter = copy.deepcopy(entry.converter)
        for pattern, names in entry.sources.items():
            for name in names:
                converter.add_tensor(target, name, pattern, values[name])
        converted = converter.convert(target, model=model, config=model.config)
        return {
            name: tensor[0] if isinstance(tensor, list) else tensor
            for name, tensor in converted.items()
        }

    names = [name for group in entry.sources.values() for name in group]
    try:
        sources: dict[str, OriginTensor | Computed] = convert(
            {n: OriginTensor.full(n, shapes[n]) for n in names}
        )
    except (CannotPlaceError, TypeError, AttributeError):
        converted = convert(
            {name: torch.empty(tuple(shapes[name]), device="meta") for name in names}
        )
        return {
            name: Computed(name, tensor.shape, tuple(names), convert)
            for name, tensor in converted.items()
        }
    return sources


def _by_first_name(
    model: nn.Module, parameters: dict[str, OriginTensor | Computed]
) -> dict[str, OriginTensor | Computed]:
    """Rename tied parameters to their first name; checkpoints may use any of their names."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    tied = dict(parameters)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (first_name := first[id(parameter)]) != name and name in tied:
            source = tied.pop(name)
            tied.setdefault(first_name, source)
    return tied
