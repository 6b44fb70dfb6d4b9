"""Registers datasets by ``register_dataset``, in a plug-in or in an installed package.

The registry itself is in ``config.options.data``. A dataset is imported when it is first
used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from axonlaunch.config.options.data import DATASETS, DatasetFacts, SampleShape

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
    """Register a class or a function that builds a dataset as ``data=NAME``.

    The dataset implements ``data.datasets.dataset.Dataset``, or it is a map-style
    (``__getitem__`` and ``__len__``) or iterable (``__iter__``) dataset as in torch. A resumed run
    continues an iterable one at its position if it has ``state_dict`` and ``load_state_dict``.
    Samples may have any structure.

    Args:
        name: Name of the dataset.
        config: Dataclass with a field ``name`` that types the group ``data``; the decorated object
            is called with an instance. None: it is called with the keys of ``data.arguments``.
        sample: Function from the configuration to the shape of a sample, by which an estimate needs
            no files. None: the dataset is built for an estimate too.
        files: Required keys of ``config`` that name files; an estimate needs no values for them.
        collate: Combines a list of samples, those of one micro-batch, to a batch: any nesting of
            dicts, tuples and lists of tensors. None: torch's ``default_collate``.
        summary: One line for ``axonlaunch ls data``; None: the first line of the docstring.

    Raises:
        ValueError: The name is taken, or the configuration is not a dataclass with a name.
    """
    facts = DatasetFacts(sample=sample, files=files, collate=collate)
    return DATASETS.register(name, config=config, facts=facts, summary=summary)
