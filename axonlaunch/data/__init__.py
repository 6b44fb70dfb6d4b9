"""Datasets, a file each, addressed by global sample index, and the registry that lists them.

Importing it, and making a dataset, imports no torch: what can't be read is reported before a rank
starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.registry import Entry, Registry

if TYPE_CHECKING:
    from axonlaunch.data.dataset import Dataset

__all__ = ["DATASETS", "TEXT_DATASETS", "build"]

DATASETS: Registry[Callable[[Any], Dataset]] = Registry(
    "dataset",
    {
        "python_source": Entry(
            "axonlaunch.data.python_source:PythonSource", "source of Python's standard library"
        ),
        "text": Entry("axonlaunch.data.text:Text", "your own files as bytes, data.files"),
        "tokens": Entry(
            "axonlaunch.data.tokens:TokenFile", "uint16 or uint32 tokens, memory-mapped, data.path"
        ),
        "synthetic_tokens": Entry(
            "axonlaunch.data.synthetic:SyntheticTokens", "made-up sequences that count up"
        ),
        "synthetic_images": Entry(
            "axonlaunch.data.synthetic:SyntheticImages", "made-up images, a noisy pattern a class"
        ),
        "digits": Entry("axonlaunch.data.digits:Digits", "1797 real handwritten digits"),
    },
)

TEXT_DATASETS = ("python_source", "text")
"""Those whose tokens are bytes of text: ``data.text.encode`` and ``decode`` are their codec."""


def build(config: Any) -> Dataset:
    """Make the dataset that a typed configuration describes.

    Raises:
        UnknownNameError: No dataset of that name is registered.
        ConfigError: It can't be made of what the configuration names.
    """
    found: list[tuple[str, str]] = getattr(config, "problems", list)()
    if found:
        raise ConfigError(
            [ConfigIssue(f"data.{name}", message, getattr(config, name)) for name, message in found]
        )
    return DATASETS.get(config.name)(config)
