"""Decides what the fork server imports for a run in addition to the modules of every rank.

The overrides of a command line decide before they are composed, so that the server starts first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from axonlaunch.system.processes import forkserver

if TYPE_CHECKING:
    from axonlaunch.config import RunConfig

_COMPILES = re.compile(r"compile|deterministic|pipeline|strategy=(hybrid|auto)")
"""Overrides of runs that import torch's compiler, directly or through torch's pipelines."""
_TRANSFORMERS = {"model=hf", "+model=hf", "model.name=hf"}


def preloads(overrides: Sequence[str] | None, *, traces: bool = True) -> list[str]:
    """Return the modules to import for a command line.

    If only a configuration file shows that a module is needed, each rank imports it.

    Args:
        overrides: Overrides of the command line.
        traces: Whether the command traces a training step on fake tensors.
    """
    words = [*(overrides or ())]
    return forkserver.modules_to_preload(
        compiler=traces or any(_COMPILES.search(word) for word in words),
        transformers=bool(_TRANSFORMERS & {*words}),
    )


def preloads_of_config(config: RunConfig, *, traces: bool = True) -> list[str]:
    """Return the modules to import for a configuration.

    Args:
        config: Typed configuration.
        traces: Whether a training step is traced on fake tensors.
    """
    from axonlaunch.config.options.model import MODELS  # commands start the server before

    train, needs = config.train, MODELS.entry(config.model.name).needs
    compiles = train.compile or train.deterministic or config.strategy.pipeline.degree > 1
    return forkserver.modules_to_preload(
        compiler=traces or compiles,
        transformers=needs is not None and needs.module == "transformers",
    )
