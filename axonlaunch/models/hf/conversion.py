"""Where each parameter of a model is among the tensors of a checkpoint, and back.

transformers renames tensors and packs experts while it reads, and undoes both when it writes; its
own code is asked, with ``Laid`` in place of tensors, or on the tensors where it computes with them.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.models.hf import library
from axonlaunch.models.pieces import CannotPlaceError, Laid, Read


@dataclass(frozen=True)
class Computed:
    """A parameter that is computed from whole tensors of a checkpoint, and can't be read in part.

    Attributes:
        name: Its own.
        shape: Its own.
        sources: The tensors' names.
        convert: Them, by name, to parameters, by name.
    """

    name: str
    shape: torch.Size
    sources: tuple[str, ...]
    convert: Callable[[Mapping[str, Any]], dict[str, Any]]

    def read(
        self, read: Read, offsets: Sequence[int], lengths: Sequence[int], into: Tensor
    ) -> None:
        """Fill a tensor with a region of the parameter; all of it is in memory meanwhile.

        Args:
            read: Reads a source, by its name; an empty region is the whole.
            offsets: First index of the region in each dim.
            lengths: How many it has of each.
            into: [*lengths]; written in place.
        """
        region = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        values = self.convert({name: read(name, ()) for name in self.sources})[self.name]
        into.copy_(values[region])


@dataclass(frozen=True)
class Conversion:
    """What a checkpoint has of a model.

    Attributes:
        parameters: By name of the model: where its values are.
        unexpected: Names of tensors that the model has no place for.
    """

    parameters: Mapping[str, Laid | Computed]
    unexpected: tuple[str, ...] = ()


@dataclass
class _Collected:
    """What goes into one converter of transformers.

    Attributes:
        converter: Its own; None: one tensor is taken as it is.
        sources: By the pattern that they match, in order.
    """

    converter: Any
    sources: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def conversion(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> Conversion:
    """Find a model's parameters among a checkpoint's tensors, as ``from_pretrained`` does.

    Args:
        model: Of transformers; without storage.
        shapes: Of the checkpoint's tensors, by name.
    """
    wanted = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    wanted |= {name for name, _ in model.named_buffers()}
    collected: dict[str, _Collected] = {}
    unexpected = []
    for source, target, pattern, converter in library.targets(model, list(shapes)):
        if target not in wanted:
            unexpected.append(source)
            continue
        entry = collected.setdefault(target, _Collected(converter))
        entry.sources[pattern or source].append(source)
    parameters: dict[str, Laid | Computed] = {}
    for target, entry in collected.items():
        parameters |= _places(model, target, entry, shapes)
    ignored = library.ignored_patterns(model)
    left = [
        name
        for name in unexpected
        if not any(re.search(expression, name) for expression in ignored)
    ]
    return Conversion(_by_first_name(model, parameters), tuple(left))


def as_saved(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, blocks: str | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters as ``save_pretrained`` writes them, a block at a time.

    Args:
        model: Of transformers; without storage.
        tensors: Its parameters and their names, those of a block after another.
        blocks: Path of the list of blocks, which are converted apart; None: all are together.
    """

    def block(named: tuple[str, Tensor]) -> str:
        prefix = f"{blocks}."
        return named[0].removeprefix(prefix).split(".")[0] if named[0].startswith(prefix) else ""

    for _, group in groupby(tensors, key=block):
        yield from library.revert_conversion(model, dict(group)).items()


def _places(
    model: nn.Module, target: str, entry: _Collected, shapes: Mapping[str, Sequence[int]]
) -> dict[str, Laid | Computed]:
    if entry.converter is None:
        [[source, *_]] = entry.sources.values()
        return {target: Laid.whole(source, shapes[source])}

    def convert(values: Mapping[str, Any]) -> dict[str, Any]:
        converter = copy.deepcopy(entry.converter)
        for pattern, names in entry.sources.items():
            for name in names:
                converter.add_tensor(target, name, pattern, values[name])
        made = converter.convert(target, model=model, config=model.config)
        return {
            name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()
        }

    names = [name for group in entry.sources.values() for name in group]
    try:
        placed: dict[str, Laid | Computed] = convert({n: Laid.whole(n, shapes[n]) for n in names})
    except (CannotPlaceError, TypeError, AttributeError):
        made = convert({name: torch.empty(tuple(shapes[name]), device="meta") for name in names})
        return {
            name: Computed(name, tensor.shape, tuple(names), convert)
            for name, tensor in made.items()
        }
    return placed


def _by_first_name(
    model: nn.Module, parameters: dict[str, Laid | Computed]
) -> dict[str, Laid | Computed]:
    """Call what is tied by its first name, whichever of its names a checkpoint has."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    tied = dict(parameters)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (own := first[id(parameter)]) != name and name in tied:
            place = tied.pop(name)
            tied.setdefault(own, place)
    return tied
