"""Changes the class of a module in place, so that references to it stay valid.

Also finds the argument that such a class may change.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar

from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def first_argument(module: nn.Module) -> str:
    """Return the name of the first parameter of a module's forward."""
    return next(iter(inspect.signature(module.forward).parameters))


def convert_module(module: nn.Module, kind: type[ModuleT], *, beneath: bool = False) -> ModuleT:
    """Change a module to another class in place; its name, parameters and attributes stay.

    The module's ``__class__`` is replaced, not the module, because other objects may refer to it. A
    module of a subclass also stays an instance of that subclass. Two examples, with the bases of
    the class that the module gets:

        a subclass of nn.Linear           (ColumnParallelLinear, Subclass)
        an embedding whose forward is     (Subclass, VocabParallelEmbedding), with ``beneath``:
        ``super().forward(x) * scale``    ``super()`` is now the vocabulary-parallel embedding

    Args:
        module: Module to change.
        kind: New class.
        beneath: Whether the forward of the module's present class is kept and calls the forward of
            ``kind`` through ``super()``.
    """
    classes: Any = kind, type(module)
    module.__class__ = _join_classes(*classes, beneath)
    assert isinstance(module, kind)
    return module


@functools.cache
def _join_classes(new_class: Any, old_class: Any, beneath: bool) -> Any:
    if issubclass(new_class, old_class):
        return new_class
    attributes = {
        "__module__": old_class.__module__,
        "__qualname__": old_class.__qualname__,
        "__doc__": old_class.__doc__,
    }
    return type(
        old_class.__name__,
        (old_class, new_class) if beneath else (new_class, old_class),
        attributes,
    )
