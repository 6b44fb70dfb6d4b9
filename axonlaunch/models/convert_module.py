"""A module that becomes one of another class where it is, among those that refer to it."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def convert_module(module: nn.Module, kind: type[ModuleT], *, beneath: bool = False) -> ModuleT:
    """Turn a module into another kind in place: it keeps its name, parameters and attributes.

    A module of a subclass stays one of it too. Its class is swapped, rather than the module, for
    others may refer to it. Two examples, with the bases of the class that a module gets:

        a subclass of nn.Linear           (ColumnParallelLinear, Subclass)
        an embedding whose forward is     (Subclass, VocabParallelEmbedding), ``beneath``:
        ``super().forward(x) * scale``    now ``super()`` is the vocabulary-parallel one

    Args:
        module: To be changed.
        kind: What it becomes.
        beneath: Whether its own forward stays, which calls that of ``kind`` as the one above it.
    """
    classes: Any = kind, type(module)
    module.__class__ = _join_classes(*classes, beneath)
    assert isinstance(module, kind)
    return module


@functools.cache
def _join_classes(kind: Any, own: Any, beneath: bool) -> Any:
    if issubclass(kind, own):
        return kind
    named = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (own, kind) if beneath else (kind, own), named)
