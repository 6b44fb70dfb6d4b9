"""How a dataset joins: ``register_dataset``, in a plug-in or in a package that offers it.

The table itself is ``config.data``'s; what is listed is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from axonlaunch.config.data import DATASETS, DatasetFacts, SampleShape

_Builder = TypeVar("_Builder", bound=Callable[..., Any])


def register_dataset(
    name: str,
    *,
    config: type | None = None,
    sample: Callable[[Any], SampleShape] | None = None,
    files: tuple[str, ...] = (),
    collate: Callable[[list[Any]], Any] | None = None,
    summary: str | None = None,
) -> Callable[[_Builder], _Builder]:
    """Register a class or a function that makes a dataset as ``data=NAME``.

    It is one of the form of ``data.dataset.Dataset``; or, as torch has them, a map-style one
    (``__getitem__`` and ``__len__``), or an iterable one (``__iter__``), which a resumed run puts
    where it was if it has ``state_dict`` and ``load_state_dict``. Samples may be of any structure.

    Args:
        name: The name.
        config: Dataclass with a field ``name`` that types the group ``data``; what is decorated is
            called with one. None: it is called with the keys of ``data.arguments``.
        sample: Configuration to the shape of a sample, by which an estimate reads no file; None:
            the dataset is made for an estimate too.
        files: Required keys of ``config`` that name files; an estimate does without them.
        collate: Makes a batch, any nesting of dicts, tuples and lists of tensors, of a list of
            samples, those of one micro-batch; None: torch's ``default_collate``.
        summary: One line for ``axonlaunch ls data``; None: the docstring's first.

    Raises:
        ValueError: The name is taken, or the configuration is no dataclass with a name.
    """
    facts = DatasetFacts(sample=sample, files=files, collate=collate)
    return DATASETS.register(name, config=config, facts=facts, summary=summary)
